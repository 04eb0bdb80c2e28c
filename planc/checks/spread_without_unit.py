"""PL384: a `spread` rule that applies to no FSDP unit's parameters."""

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan
from planc.plan.parameter_owners import owned


def spread_without_unit(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`spread(...)` changes how parameters of a unit are placed, so a unit must contain them."""
    section = plan.fsdp
    if section is None or not section.spreads or "fsdp" in plan.broken:
        return
    found = [o for o in owned(plan, facts) if o.unit is not None]
    for spread in section.spreads:
        own = [o.unit for o in found if o.spread is spread and o.unit]
        same = plan.mesh.size(*section.extra_axes(spread))
        if section.divide is not None and same > 1:
            sink.error(
                "PL384",
                f"`divide` cannot be combined with a `spread` over {same} ranks that have the "
                "same gradient",
                Label(span=spread.origin),
                Label(span=section.divide.origin, text="FSDP has one factor per unit"),
                help="make the modules a unit: `unit(on = ...)`",
            )
        if own:
            continue
        units = [u for u in section.units if any(m.overlap(spread.modules) for m in u.members)]
        sink.error(
            "PL384",
            f"`spread` has no effect: `{spread.modules}` is in no enclosing FSDP unit",
            Label(span=spread.origin),
            *(Label(span=u.origin, text="is a unit itself") for u in units[:1]),
            help="write `on` and `shard_dim` on the unit: `unit(on = ...)`"
            if units
            else "make an enclosing module a unit, such as `model.layers.* : unit`",
        )
