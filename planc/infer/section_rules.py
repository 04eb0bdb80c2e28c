"""Asks sections for what follows from their rules."""

from collections.abc import Callable

from planc.diagnostics.diagnostic import Sink
from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.sections import IMPLIED, Hook

_COMPLETE = Hook[Callable[[Plan, Facts, Sink], Plan]]("infer", "complete")


def complete_rules(plan: Plan, facts: Facts, sink: Sink) -> Plan:
    """Adds what follows from the rules of sections that are folders.

    Before:
        tensor on tp { images = rows }    (each rank has the gradients of its own images)
        no rule on the vision encoder

    After:
        tensor on tp { images = rows }
        replicate(gradient = sum) on the vision encoder, as the section of images completes it
    """
    for complete in _COMPLETE.find_all((*IMPLIED, *plan.sections)):
        plan = complete(plan, facts, sink)
    return plan
