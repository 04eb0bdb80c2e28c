"""Stages of a pipeline that take as much time each: `stages = balanced(...)` of a plan."""

from __future__ import annotations

from dataclasses import replace

from planc.checks import check
from planc.diagnostics.diagnostic import Sink
from planc.infer.apply_adapters import adapt_plan
from planc.ir.nodes import Plan, StageTimes
from planc.ir.shared_parameters import cut_at
from planc.lowering.step import require_divisible
from planc.model.facts import Facts


def with_timed_stages(plan: Plan, facts: Facts, sink: Sink) -> Plan:
    """Cuts the stages of a pipeline by the time of their layers, if the plan asks for it.

    Before:
        stages = balanced(model.layers.*, seq = 4096)
        stage 0: model.layers[0:16]     (equal work of parameters)
        stage 1: model.layers[16:32], lm_head

    After:
        stages = balanced(model.layers.*, seq = 4096)
        stage 0: model.layers[0:18]     (equal seconds)
        stage 1: model.layers[18:32], lm_head

    Args:
        plan, facts: without adapters; the stages have as much work each.
        sink: receives PL564 where the time of layers is unknown, and PL702 where the ranks cannot
            split the rows that the plan states. Other errors are left to the checks.
    """
    rule = plan.pipeline
    if rule is None or rule.times is None or plan.broken:
        return plan
    applied, found = adapt_plan(plan, facts), Sink()
    check(*applied, found, bare=(plan, facts))
    if found.errors:
        return plan
    from planc.tools.estimate.cuts import cuts_of  # few plans need it, and it takes time
    from planc.tools.estimate.kept_tensors import count

    cuts, before = cuts_of(*applied, rule), sink.errors
    require_divisible(cuts.work.of_batch(), plan.mesh, sink)
    if sink.errors > before:
        return plan
    unknown = Sink()
    counted = count(applied[1], unknown, cuts.work.micro_batch)
    if counted is None:
        reason = next(iter(unknown)).message.partition(": ")[2]
        hint = f"write `even({rule.op.blocks}.*, by = work)`"
        message = f"stages cannot be cut by time: {reason}"
        sink.error("PL564", message, rule.times.origin, help=hint)
        return plan
    bounds, seconds = cuts.best(counted)
    cut = rule.times
    times = StageTimes(rows=cut.rows, seq=cut.seq, seconds=seconds, origin=cut.origin)
    return replace(plan, pipeline=replace(rule, op=cut_at(rule.op, bounds, facts), times=times))
