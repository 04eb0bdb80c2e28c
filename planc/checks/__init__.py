"""Floor 3: what a plan that is well formed can still get wrong. One rule a file."""

from __future__ import annotations

from collections.abc import Callable

from planc.diagnostic import Sink
from planc.ir.plan import Plan
from planc.model.facts import Facts

RULES: tuple[Callable[[Plan, Facts, Sink], None], ...] = ()


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Runs every rule; the findings go to the sink."""
    for rule in RULES:
        rule(plan, facts, sink)
