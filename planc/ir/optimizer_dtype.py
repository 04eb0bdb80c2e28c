"""The dtype of the parameters that the optimizer steps, if a plan does not state it: float32."""

from dataclasses import replace

from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.ops.load import Load


def assume_fp32_steps(plan: Plan, facts: Facts) -> Plan | None:
    """Returns the plan with parameters loaded in float32, as in the documented script.

    None if the plan states a dtype, a script built the model, or the plan has adapters, whose
    frozen base weights keep their stored dtype. Also None if no parameter is stored in 16 bits.
    """
    load = plan.load or Load()
    if facts.built or load.dtype or plan.adapters is not None:
        return None
    stored = {p.dtype for part in facts.model.below() for p in part.module.parameters}
    half = stored & {"bfloat16", "float16"}
    return replace(plan, load=replace(load, dtype="float32")) if half else None
