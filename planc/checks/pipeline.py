"""PL561, PL562, PL565, PL567: pipelines that cannot run, or would train another model.

PL569: checkpoints that save nothing.
"""

from collections.abc import Iterator

from planc.diagnostics.diagnostic import Label, Sink
from planc.diagnostics.source import Span
from planc.ir.nodes import PipelineRule, Plan
from planc.ir.parameter_owners import owned_modules
from planc.model.facts import Facts
from planc.ops.pipeline import TERMS, Pipeline


def pipeline(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The schedule, what crosses from stage to stage, and what a pipeline does not support."""
    rule = plan.pipeline
    if rule is None or "pipeline" in plan.broken:
        return
    _schedule(plan, rule.op, sink)
    _router_logits(facts, rule, sink)
    for what, line, help in (
        *_without_training(plan, facts, rule.op),
        *_unsupported_features(plan, rule.op),
    ):
        label = Label(span=rule.origin, text="a pipeline")
        sink.error("PL567", what, Label(span=line), label, help=help)
    if rule.op.splits and plan.checkpoint_rules:
        sink.warning(
            "PL569",
            f"{rule.op.schedule} computes the gradients of weights later, and torch recomputes a "
            "block for each of them and keeps most of it: memory is not saved",
            Label(span=plan.checkpoint_rules[0].origin, text="checkpointed"),
            Label(span=rule.op.origin_of("schedule") or rule.op.origin),
            help="use another schedule, or no checkpoints",
        )


def _schedule(plan: Plan, op: Pipeline, sink: Sink) -> None:
    """Source: what the constructors of `torch.distributed.pipelining.schedules` refuse."""
    ranks, terms = plan.mesh.size(op.axis), TERMS[op.schedule]
    line = op.origin_of("schedule") or op.origin
    labels = (
        Label(span=line, text=op.schedule),
        Label(span=op.origin_of("stages") or op.origin, text=f"{op.stages} stages"),
    )
    wanted = ranks * terms.each
    if op.stages % ranks or (wanted and op.stages != wanted):
        each = f"{terms.each} on each rank" if wanted else "as many on each rank"
        sink.error(
            "PL562",
            f"{op.schedule} on {ranks} ranks runs {wanted or f'a multiple of {ranks}'} stages, "
            f"{each}, and the plan has {op.stages}",
            *labels,
            help=f"write `stages = even({op.blocks}.*)`, for as many as the schedule runs",
        )
        return
    count, said = op.microbatches, op.origin_of("microbatches") or op.origin
    label = Label(span=said, text=f"{count} microbatch{'es' * (count > 1)}")
    if not terms.is_filled(count, op.stages):
        message = f"{op.schedule} takes at least as many microbatches as stages"
        hint = f"use {op.stages} or more, or `schedule = gpipe`"
        sink.error("PL561", message, label, *labels, help=hint)
    if not terms.rounds(count, ranks):
        message = f"{op.schedule} on {ranks} ranks cannot run {count} microbatches in equal rounds"
        hint = f"use a multiple of {ranks}"
        sink.error("PL561", message, label, *labels, help=hint)


def _router_logits(facts: Facts, rule: PipelineRule, sink: Sink) -> None:
    if facts.config.get("output_router_logits"):
        sink.error(
            "PL565",
            "the loss takes the router's logits of all blocks, and the last stage has those of its "
            "own",
            rule.op.origin_of("stages") or rule.op.origin,
            facts=["config.output_router_logits = true"],
            help="set `output_router_logits` to false in the configuration, or "
            f"`{rule.op.axis} = 1`",
        )


def _without_training(plan: Plan, facts: Facts, op: Pipeline) -> Iterator[tuple[str, Span, str]]:
    """Like `_unsupported`, for stages without trained parameters: an optimizer accepts no empty
    list.
    """
    section = plan.adapters if plan.adapters and plan.adapters.rules else None
    if section is None and not plan.freezes:
        return
    trained = [
        assignment.modules for assignment in owned_modules(plan, facts) if assignment.has_trainable
    ]
    for stage in range(op.stages):
        if any(modules.is_within(part) for modules in trained for part in op.stage_modules(stage)):
            continue
        if section:
            text = f"stage {stage} has no adapter, and nothing to train"
            yield text, section.origin, "adapt layers of every stage"
        else:
            text = f"stage {stage} has nothing to train: all of its parameters are frozen"
            help = f"train a part of every stage, or set `{op.axis} = 1`"
            yield text, plan.freezes[0].origin, help


def _unsupported_features(plan: Plan, op: Pipeline) -> Iterator[tuple[str, Span, str]]:
    """(what is not supported with a pipeline, its line, what to do)."""
    alone = f"set `{op.axis} = 1`"
    for context in plan.context if op.added else ():
        if plan.mesh.size(context.axis) > 1:
            text = f"features of images are added to {op.added} blocks, and stage 0 has "
            text += f"{op.bounds[1]}: later stages get them of whole rows"
            yield text, context.origin, f"give stage 0 at least {op.added} blocks, or {alone}"
    if plan.load is not None and plan.load.weights == "rank0":
        text = "rank 0 sends a tensor to ranks that all have it, and stages have different ones"
        yield text, plan.load.origin_of("weights") or plan.load.origin, "write `weights = slices`"
    if plan.fsdp is not None:
        if (backend := plan.fsdp.backend) is not None:
            yield f"{backend.TITLE} in a pipeline is not supported", plan.fsdp.origin, alone
        if op.axis in {*plan.fsdp.shard, *plan.fsdp.replicate}:
            text = f"the ranks of {op.axis} hold different parameters, so nothing is sharded or "
            yield f"{text}replicated over it", plan.fsdp.origin, "name other axes"
        for unit in plan.fsdp.units if op.splits else ():
            if unit.reshard:
                text = f"{op.schedule} computes the gradients of weights later than those of "
                text += "inputs, when this unit has resharded its parameters"
                yield text, unit.origin, "write `reshard = never`"
    for rule in plan.tensor:
        if rule.axis == op.axis:
            text = f"the ranks of {op.axis} run different blocks, so no weight is split over it"
            yield text, rule.origin, "name another axis"
    for compiled in plan.compilations if op.splits else ():
        text = f"{op.schedule} splits backward passes, and compiled modules have one"
        yield text, compiled.origin, "use another schedule"
