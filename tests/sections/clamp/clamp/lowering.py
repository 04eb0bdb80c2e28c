"""The operations of clamp rules."""

from collections.abc import Iterator

from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.ops.registry import AnyOp


def lower(plan: Plan, _facts: Facts) -> Iterator[AnyOp]:
    """The operations of the rules."""
    yield from plan.sections["clamp"]
