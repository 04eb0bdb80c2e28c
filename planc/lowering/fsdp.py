"""Units -> `fully_shard` operations, inner before outer, and what is set on them afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planc.lowering.memory import Holdings
from planc.model.facts import Facts, Modules
from planc.ops.fsdp import Divide, FullyShard, Prefetch, Spread
from planc.plan import ir
from planc.plan.ir import Fsdp, Plan, Unit
from planc.plan.unit_lists import lists


def units_of(section: Fsdp, holdings: Holdings) -> Iterator[FullyShard]:
    """The operations of a section's units, in an order in which torch can run them."""
    for unit in _inner_first(section.units):
        precision = unit.precision or section.precision
        shard, replicate = _wide(unit, section, holdings.plan)
        nbytes, gathered = holdings.of_unit(unit, precision)
        yield FullyShard(
            members=unit.members,
            group=unit.group,
            shard=shard,
            replicate=replicate,
            reshard=unit.reshard,
            param=precision.param if precision else None,
            reduce=precision.reduce if precision else None,
            output=precision.output if precision else None,
            cast_inputs=precision.cast_inputs if precision else True,
            nbytes=nbytes,
            gathered=gathered,
            ignored=tuple(i.modules for i in section.ignored if _leaves(unit, i.modules)),
            shard_dim=unit.shard_dim,
            spreads=_spreads(unit, section, holdings),
            offload=section.offload is not None,
            pin=section.offload is not None and section.offload.pin,
            place=unit.origin.place,
        )


def _spreads(unit: Unit, section: Fsdp, holdings: Holdings) -> tuple[Spread, ...]:
    """What lies otherwise in a unit; the same words for like units, so that they stay one."""
    there = [h.spread for h in holdings.all if h.unit is unit]
    found = [s for s in section.spreads if any(s is other for other in there)]
    return tuple(
        Spread(
            modules=spread.modules,
            shard=_wide(spread, section, holdings.plan)[0],
            replicate=_wide(spread, section, holdings.plan)[1],
            shard_dim=spread.shard_dim,
        )
        for spread in sorted(found, key=lambda s: len(s.modules.path))
    )


def _leaves(unit: Unit, ignored: Modules) -> bool:
    """Whether ignored modules are inside a unit."""
    return any(ignored.within(member) for member in unit.members)


def settings(plan: Plan, facts: Facts) -> Iterator[Divide | Prefetch]:
    """What is set on all units, once they are."""
    section = plan.fsdp
    if section is None or section.megatron is not None:
        return
    if section.divide is not None:
        factor, place = section.divide.factor, section.divide.origin.place
        yield Divide(factor=factor, place=place)
        for unit in section.units:
            # the ranks of a tensor axis have the same gradient, and each of them adds it
            same = plan.mesh.size(*section.beyond(unit))
            if same > 1:
                yield Divide(factor=factor * same, units=unit.members, place=place)
    for units in lists(plan, facts) if section.prefetch else ():
        assert section.prefetch is not None
        yield Prefetch(
            units=units,
            forward=section.prefetch.forward,
            backward=section.prefetch.backward,
            place=section.prefetch.origin.place,
        )


def _wide(
    unit: Unit | ir.Spread, section: Fsdp, plan: Plan
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of more than one rank: the rest would only cost process groups.

    FSDP keeps one axis to work over even of one rank, where it still casts and sums gradients.
    """
    split, copied = section.axes(unit)
    shard = tuple(a for a in split if plan.mesh.size(a) > 1)
    replicate = tuple(a for a in copied if plan.mesh.size(a) > 1)
    if not split:
        return (), replicate or copied[:1]
    return shard or split[:1], replicate


def _inner_first(units: Iterable[Unit]) -> list[Unit]:
    """The plan's order, but a unit never before one inside it; the root comes last by that."""
    rest = list(units)
    ordered: list[Unit] = []
    while rest:
        ready = next(
            (u for u in rest if not any(_holds(u, o) for o in rest if o is not u)), rest[0]
        )
        ordered.append(ready)
        rest.remove(ready)
    return ordered


def _holds(outer: Unit, inner: Unit) -> bool:
    return any(
        len(i.path) > len(o.path) and i.within(o) for o in outer.members for i in inner.members
    )
