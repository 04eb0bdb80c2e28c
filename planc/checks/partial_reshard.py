"""PL417: a partial reshard whose size does not divide the unit's ranks."""

from planc.diagnostic import Label, Sink, one_of
from planc.model.facts import Facts
from planc.plan.ir import Plan, SpreadRule, Unit
from planc.plan.parameter_owners import owned


def partial_reshard(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`reshard = N` reshards to groups of N ranks, so N must divide the unit's number of ranks.

    Source: `fully_shard` in torch takes a non-trivial divisor of the shard mesh's size.
    """
    if plan.fsdp is None:
        return
    spread = [(o.unit, o.spread) for o in owned(plan, facts) if o.unit and o.spread]
    pairs: list[tuple[Unit, Unit | SpreadRule]] = [(u, u) for u in plan.fsdp.units]
    for unit, part in dict.fromkeys([*pairs, *spread]):
        shard, _ = plan.fsdp.axes(part)
        size = plan.mesh.size(*shard)
        count = unit.reshard
        if isinstance(count, bool) or (1 < count < size and size % count == 0):
            continue
        if size == 1 and plan.mesh.assumed:
            continue
        choices = [n for n in range(2, min(size, 1024)) if size % n == 0]
        axes = (a for a in plan.mesh.axes if a.name in shard)
        labels = [Label(span=a.origin, text=f"{a.name} is {a.size}") for a in axes]
        words = {
            1: "the shard of one rank would be the full parameter: write `never`",
            size: "write `always`",
        }
        told = f"it can be {one_of(map(str, choices[:8]))}, or `always`"
        told = words.get(count) or (told if choices else "write `always`, or `never`")
        told = "write `always`, or `never`" if size == 1 else told
        sink.error(
            "PL417",
            f"{size} rank{'s' if size > 1 else ''} cannot reshard to {count}{_why(count, size)}",
            Label(span=unit.origin),
            *([Label(span=part.origin, text="shards over other axes")] if part is not unit else []),
            *labels,
            help=told,
        )


def _why(count: int, size: int) -> str:
    if size == 1:
        return ": there is nothing to reshard"
    if count == size:
        return ": the unit is sharded over that many ranks already"
    return f": it does not divide {size}" if count > 1 else ""
