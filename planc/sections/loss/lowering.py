"""The operations of loss rules, and their collectives."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from planc.ir.nodes import Plan
from planc.lowering.step import REDUCE, During, Sent, Step, collective_kind, gather_template
from planc.model.facts import Facts
from planc.ops.contract import contract
from planc.ops.registry import AnyOp
from planc.sections.loss.ops import ChunkLoss


def lower(plan: Plan, _facts: Facts) -> Iterator[AnyOp]:
    """Yields the operations of loss rules, over the axes with more than one rank."""
    for rule in plan.sections["loss"]:
        yield replace(rule, axes=tuple(a for a in rule.axes if plan.mesh.size(a) > 1))


def sends(op: AnyOp, step: Step) -> Iterator[Sent]:
    """Yields the collectives: the all-gather of hidden states for the head, the reduction of their
    gradients, and three numbers per token.
    """
    if not isinstance(op, ChunkLoss) or not op.axes:
        return
    one = replace(gather_template(op.WORD, op.modules, op.axes), times=step.passes)
    heads = [contract(o.style) for o in step.lowered.styles if op.modules.is_within(o.modules)]
    states = step.size(step.hidden)
    if any(collective_kind(*flow.forward) for head in heads for flow in head.takes):
        yield replace(one, size=states)
    yield replace(one, kind=REDUCE, size=states, during=During.BACKWARD)
    # of each token three numbers in float32
    ranks = step.lowered.axis_size(*op.axes)
    size = None if step.tokens is None else 12 * ceil(step.tokens / op.chunks) * ranks
    yield replace(one, where="each token", times=step.passes * op.chunks, size=size)
