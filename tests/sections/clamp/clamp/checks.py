"""PL999."""

from planc.diagnostics.diagnostic import Sink
from planc.ir.nodes import Plan
from planc.model.facts import Facts


def check(plan: Plan, _facts: Facts, sink: Sink) -> None:
    """Reports rules on lists, which are not called."""
    for rule in plan.sections["clamp"]:
        if rule.modules.module.kind == "list":
            sink.error("PL999", f"{rule.modules} is a list", rule.origin)
