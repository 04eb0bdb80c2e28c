"""Checkpoint rules as operations."""

from collections.abc import Iterator

from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.ops.registry import AnyOp


def lower(plan: Plan, _facts: Facts) -> Iterator[AnyOp]:
    """The rules, nested modules first: after wrapping, a path through the wrapper is invalid."""
    rules = plan.checkpoint_rules
    nested = any(a.modules.deeper(b.modules) for a in rules for b in rules)
    yield from sorted(rules, key=lambda r: -len(r.modules.path)) if nested else rules
