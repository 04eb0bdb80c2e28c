"""PL416: a precision that no unit uses."""

from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan


def unused_precision(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The section's precision applies to units without their own."""
    if plan.fsdp is None or plan.fsdp.precision is None or "fsdp" in plan.broken:
        return
    if all(u.precision is not None for u in plan.fsdp.units):
        reason = "every unit has its own" if plan.fsdp.units else "the section has no unit"
        message = f"no unit uses this precision: {reason}"
        sink.error("PL416", message, plan.fsdp.precision.origin, help="remove it, or add a unit")
