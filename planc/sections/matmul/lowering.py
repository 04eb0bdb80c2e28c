"""The operations of matmul rules, and what they send and hold."""

from collections.abc import Iterator
from dataclasses import replace

from planc.ir.nodes import Plan
from planc.lowering.step import REDUCE, Sent, Step, parameters_of
from planc.model.facts import DTYPE_BYTES, Facts
from planc.ops.registry import AnyOp
from planc.sections.matmul.ops import LowPrecision, ScaleWeights


def lower(plan: Plan, _facts: Facts) -> Iterator[AnyOp]:
    """The operations of rules, and scales of all ranks for weights that FSDP gathers in fp8."""
    yield from plan.sections["matmul"]
    if any(rule.gather for rule in plan.sections["matmul"]):
        yield ScaleWeights()


def narrow_rules(plan: Plan) -> Iterator[LowPrecision]:
    """The rules on modules whose weights FSDP gathers in fp8."""
    return (rule for rule in plan.sections["matmul"] if rule.gather)


def sends(op: AnyOp, step: Step) -> Iterator[Sent]:
    """The largest values of all weights that FSDP gathers in fp8, before each forward pass."""
    if not isinstance(op, ScaleWeights):
        return
    weights = [one.modules for one in step.lowered.find_ops(LowPrecision) if one.gather]
    shard = next(o.shard for o in step.lowered.fsdp_units if o.shard and o.saved)
    split = (o for o in step.lowered.styles if any(o.modules.overlap(m) for m in weights))
    stored = next(p.dtype for m in weights for p in parameters_of(m) if p.name == "weight")
    sent = Sent(
        word=op.WORD,
        where="weights gathered in fp8",
        kind=REDUCE,
        axes=shard,
        times=step.passes,
        size=sum(map(len, weights)) * DTYPE_BYTES[stored],
    )
    for axes in dict.fromkeys((shard, *(o.axes for o in split))):
        yield replace(sent, axes=axes)
