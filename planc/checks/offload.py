"""PL447: parameters in host memory beside what must stay on the device."""

from __future__ import annotations

from planc.diagnostic import Sink
from planc.ir.plan import Plan
from planc.model.facts import Facts


def offload(plan: Plan, facts: Facts, sink: Sink) -> None:
    """TODO"""
