"""The rules as operations."""

from collections.abc import Iterator

from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.ops.registry import AnyOp


def lower(plan: Plan, _facts: Facts) -> Iterator[AnyOp]:
    """The rules, in the plan's order."""
    yield from plan.sections["compile"]
