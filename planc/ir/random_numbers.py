"""The causes of random numbers in training, and the axes whose ranks share activations."""

from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.model.randomness import random_fields
from planc.ops.base import AxisRole


def drawing_fields(plan: Plan, facts: Facts) -> tuple[str, ...]:
    """The causes of random numbers in training: `name = value`, of adapters too, and lines of the
    model's code.
    """
    rules = plan.adapters.rules if plan.adapters else ()
    rates = dict.fromkeys(r.adapt.dropout for r in rules if r.adapt.dropout)
    adapters = (f"dropout = {rate} of adapters" for rate in rates)
    return (*random_fields(facts), *adapters, *plan.draws)


def apart_axes(plan: Plan) -> tuple[str, ...]:
    """The axes of more than one rank whose ranks read the same rows, and compute other layers or
    other tokens of them.
    """
    axes = (*plan.mesh.of_role(AxisRole.STAGE), *plan.mesh.of_role(AxisRole.SEQUENCE))
    return tuple(a.name for a in axes if a.size > 1)


def split_axes(plan: Plan) -> tuple[str, ...]:
    """The tensor axes of more than one rank that the plan's rules split layers over."""
    return tuple(dict.fromkeys(r.axis for r in plan.tensor if plan.mesh.size(r.axis) > 1))
