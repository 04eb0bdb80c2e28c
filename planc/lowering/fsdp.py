"""FSDP units -> `fully_shard` operations in topological order, and the settings of units."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from planc.ir.experts import dividing
from planc.ir.nodes import Fsdp, Meaning, Plan, SpreadRule, Unit
from planc.ir.parameter_owners import owned_modules
from planc.ir.unit_lists import lists
from planc.lowering.memory import Holdings
from planc.model.facts import Facts
from planc.ops.base import AxisRole
from planc.ops.expert_parallel import ALL_REDUCE
from planc.ops.fsdp import Divide, FullyShard, Prefetch, Spread


def units_of(section: Fsdp, holdings: Holdings) -> Iterator[FullyShard]:
    """The operations of a section's units, nested units first; equal ones are not yet joined."""
    parts = ((u, part) for u in _inner_first(section.units) for part in holdings.parts(u))
    for unit, members in parts:
        precision = section.policy(unit)
        shard, replicate = _wide(unit, section, holdings.plan)
        nbytes, gathered, frozen, saved = holdings.of_unit(unit, precision, members)
        ignored = [i for i in section.ignored if any(i.modules.is_within(m) for m in unit.members)]
        spreads = _spreads(unit, section, holdings)
        named: list[tuple[str, Meaning | None]]
        named = [("precision", precision), ("offload", section.offload)]
        named += [(f"ignored.{i}", rule) for i, rule in enumerate(ignored)]
        named += [(f"spreads.{i}", rule) for i, rule in enumerate(spreads)]
        yield FullyShard(
            members=members,
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
            frozen=frozen,
            saved=saved,
            ignored=tuple(i.modules for i in ignored),
            shard_dim=unit.shard_dim,
            scalars=any(h.unit is unit and not h.parameter.shape for h in holdings.all),
            spreads=tuple(_spread(s, section, holdings.plan) for s in spreads),
            offload=section.offload is not None,
            pin=section.offload is not None and section.offload.pin,
            origin=unit.origin,
            origins=tuple((name, node.origin) for name, node in named if node),
        )


def _spreads(unit: Unit, section: Fsdp, holdings: Holdings) -> list[SpreadRule]:
    """The spreads of a unit's parameters, outer modules first.

    They keep the modules of their rule, so that units of one line stay equal and can be merged.
    """
    there = [h.spread for h in holdings.all if h.unit is unit]
    spreads = [s for s in section.spreads if any(s is other for other in there)]
    return sorted(spreads, key=lambda s: len(s.modules.path))


def _spread(rule: SpreadRule, section: Fsdp, plan: Plan) -> Spread:
    shard, replicate = _wide(rule, section, plan)
    return Spread(modules=rule.modules, shard=shard, replicate=replicate, shard_dim=rule.shard_dim)


def settings(plan: Plan, facts: Facts) -> Iterator[Divide | Prefetch]:
    """The settings of units: gradient divide factors and prefetching."""
    section = plan.fsdp
    if section is None or section.backend is not None:
        return
    divide = section.divide or _mean(plan, section)
    if divide is not None:
        yield divide
        for unit in section.units:
            # ranks of a tensor axis have equal gradients, and the reduction sums all of them
            same = plan.mesh.size(*section.extra_axes(unit)) * _alike(unit, plan, facts)
            if same > 1:
                yield replace(divide, factor=divide.factor * same, units=unit.members)
    if section.prefetch is not None:
        yield from (replace(section.prefetch, units=units) for units in lists(plan, facts))


def _mean(plan: Plan, section: Fsdp) -> Divide | None:
    """The mean over the data ranks, which FSDP does not take of experts that other ranks divide.

    Their gradients are sums over all tokens of the ranks that sent some, and are reduced over fewer
    ranks than those that read data.
    """
    rules = dividing(plan)
    if not rules:
        return None
    ranks = plan.mesh.size(*section.shard, *section.replicate)
    return Divide(factor=ranks, origin=rules[0].origin)


def _alike(unit: Unit, plan: Plan, facts: Facts) -> int:
    """The ranks that compute equal gradients of a unit's experts: those of one tensor axis with the
    same experts, where each rank computes its experts for all tokens.
    """
    experts = plan.mesh.experts
    rules = [r for r in dividing(plan) if r.dispatch == ALL_REDUCE]
    members = (
        {members.modules for members in owned_modules(plan, facts) if members.unit is unit}
        if rules
        else set()
    )
    if experts is None or not any(r.modules.overlap(m) for r in rules for m in members):
        return 1
    tensor = [a.name for a in plan.mesh.of_role(AxisRole.TENSOR)]
    return plan.mesh.size(*tensor) // experts.ranks.size


def _wide(
    unit: Unit | SpreadRule, section: Fsdp, plan: Plan
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of more than one rank: others would only add process groups.

    FSDP keeps one axis even of one rank, because it still casts parameters and reduces gradients.
    """
    split, copied = section.axes(unit)
    shard, replicate = plan.mesh.wide(split), plan.mesh.wide(copied)
    if not split:
        return (), replicate or copied[:1]
    return shard or split[:1], replicate


def _inner_first(units: Iterable[Unit]) -> list[Unit]:
    """Topological order: nested units first, the root last; else the plan's order."""
    rest = list(units)
    ordered: list[Unit] = []
    while rest:
        free = (u for u in rest if not any(_holds(u, o) for o in rest if o is not u))
        ready = next(free, rest[0])
        ordered.append(ready)
        rest.remove(ready)
    return ordered


def _holds(outer: Unit, inner: Unit) -> bool:
    return any(i.deeper(o) for o in outer.members for i in inner.members)


def data_axes(plan: Plan) -> tuple[str, ...]:
    """The axes whose ranks read different data: those that average gradients.

    Context parallelism shards parameters over its axis too, but its ranks share a sample.
    """
    if plan.fsdp is None:
        return ()
    names = {*plan.fsdp.shard, *plan.fsdp.replicate}
    return tuple(
        a.name for a in plan.mesh.axes if a.name in names and a.role is not AxisRole.SEQUENCE
    )
