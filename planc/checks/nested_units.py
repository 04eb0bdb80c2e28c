"""PL410, PL411: FSDP units that contain each other, or contain no parameters."""

from planc.checks.queries import holds
from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan, Unit


def nested_units(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A group is one set of parameters: no member is inside another, and every unit needs some."""
    if plan.fsdp is None:
        return
    for unit in plan.fsdp.units:
        for member in unit.members:
            around = (o for o in unit.members if o.path != member.path and holds(o, member))
            if (outer := next(around, None)) is not None:
                message = f"`{member}` is inside `{outer}`, a member of the same group"
                sink.error("PL410", message, unit.origin, help=f"remove `{member}` from the group")
        why = [f"`{unit.members[0]}` is a {unit.members[0].module.cls}"]
        if sum(m.module.count for m in unit.members) and _left(unit, plan):
            continue
        if any(i.modules.within(m) for i in plan.fsdp.ignored for m in unit.members):
            why = ["all its parameters are ignored"]
        message = f"the unit `{unit.members[0]}` has no parameters to shard"
        sink.error("PL411", message, unit.origin, facts=why, help="remove the rule")


def _left(unit: Unit, plan: Plan) -> bool:
    """Whether any parameter inside a unit is not ignored."""
    assert plan.fsdp is not None
    ignored = [i.modules for i in plan.fsdp.ignored]
    below = (part for member in unit.members for part in member.below())
    return any(part.module.parameters and part.outside(ignored) for part in below)
