"""Places what stands before the blocks of a pipeline."""

from dataclasses import replace

from planc.diagnostics.diagnostic import Sink
from planc.ir.nodes import Plan
from planc.model.facts import Facts


def place_styled_inputs(plan: Plan, _facts: Facts, _sink: Sink) -> Plan:
    """A plan in which what stands before the blocks, and has a tensor style but no parameters, is
    on the first stage alone: elsewhere its results, laid out, would meet plain placeholders.
    """
    rule = plan.pipeline
    if rule is None:
        return plan
    styled = (m for m in rule.before if any(r.modules.overlap(m) for r in plan.tensor))
    more = tuple(m for m in styled if m not in rule.op.inputs)
    return replace(
        plan, pipeline=replace(rule, op=replace(rule.op, inputs=(*rule.op.inputs, *more)))
    )
