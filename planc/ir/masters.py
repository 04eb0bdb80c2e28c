"""The dtype that the optimizer steps if a plan does not state it: float32."""

from dataclasses import replace

from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.ops.load import Load


def masters(plan: Plan, facts: Facts) -> Plan | None:
    """The plan whose optimizer steps float32, as the documented script has it, where neither the
    plan nor a model that a script built says otherwise; None where they do, and with adapters,
    whose frozen weights are as they are stored.
    """
    load = plan.load or Load()
    if facts.built or load.dtype or plan.adapters is not None:
        return None
    stored = {p.dtype for part in facts.model.below() for p in part.module.parameters}
    half = stored & {"bfloat16", "float16"}
    return replace(plan, load=replace(load, dtype="float32")) if half else None
