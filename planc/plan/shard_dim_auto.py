"""Resolves `shard_dim = auto`, which needs parameter shapes and the tensor sections."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.plan.apply_adapters import PARAMETERLESS
from planc.plan.expert_rules import expert_styles
from planc.plan.ir import Fsdp, Plan, SpreadRule, Unit
from planc.plan.local_shapes import AUTO, even_dim, local_shape, ruled
from planc.plan.parameter_owners import Owned, owned

UnitOrSpread = TypeVar("UnitOrSpread", Unit, SpreadRule)


def settled(plan: Plan, facts: Facts, sink: Sink) -> Plan:
    """The plan with every `auto` resolved; one that cannot be resolved is PL382, at its line."""
    section = plan.fsdp
    if section is None or not section.shard or {"fsdp", "tensor"} & plan.broken:
        return plan
    if all(part.shard_dim != AUTO for part in section.parts):
        return plan
    found = list(owned(plan, facts))
    units = tuple(_settled(u, found, section, plan, sink) for u in section.units)
    spreads = tuple(_settled(s, found, section, plan, sink) for s in section.spreads)
    return replace(plan, fsdp=replace(section, units=units, spreads=spreads))


def _settled(
    part: UnitOrSpread, found: list[Owned], section: Fsdp, plan: Plan, sink: Sink
) -> UnitOrSpread:
    if part.shard_dim != AUTO:
        return part
    ranks = plan.mesh.size(*section.axes(part)[0])
    own = dict(held(part, found, plan))
    dim = even_dim(list(own.values()), ranks)
    if dim is None:
        short = [(n, s) for n, s in own.items() if len(s) > 1 and s[0] < ranks]
        sink.error(
            "PL382",
            f"`shard_dim = auto` finds no dim to split over {ranks:,} ranks",
            part.origin,
            facts=[f"{name} is {list(shape)} on a rank" for name, shape in short[:3]],
            help="a dim other than the first must divide; name fewer axes by `on = ...`",
        )
        return part
    return replace(part, shard_dim=dim)


def held(
    part: Unit | SpreadRule, found: list[Owned], plan: Plan
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape after tensor parallelism) of the parameters that a unit or spread places.

    Args:
        found: the result of `owned` for the plan.
    """
    rules = [r for r in plan.tensor if plan.mesh.size(r.axis) > 1]
    rules = [r for r in rules if not isinstance(r.style, PARAMETERLESS)] + expert_styles(plan)
    for own in found:
        if (own.spread or own.unit) is not part or own.unit is None:
            continue
        for modules, found_rules in ruled(own.modules, rules):
            for parameter in modules.module.parameters:
                yield f"{modules}.{parameter.name}", local_shape(parameter, found_rules, plan)
