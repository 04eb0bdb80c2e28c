"""Chooses the dims of `shard_dim = auto`, along which FSDP shards parameters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from planc.diagnostics.diagnostic import Sink
from planc.ir.local_shapes import AUTO, placed_parameters
from planc.ir.nodes import Fsdp, Plan, SpreadRule, Unit
from planc.ir.parameter_owners import Owned, owned_modules
from planc.model.facts import Facts

UnitOrSpread = TypeVar("UnitOrSpread", Unit, SpreadRule)


def choose_shard_dims(plan: Plan, facts: Facts, sink: Sink) -> Plan:
    """Resolves `shard_dim = auto`; reports PL382 at the line if no dim can be sharded.

    Before:
        model.layers.*.mlp.experts : unit(on = ep_shard, shard_dim = auto)
        (gate_up_proj [8, 2048, 512] and down_proj [8, 256, 2048] on a rank)
        (ep_shard = 16)

    After:
        model.layers.*.mlp.experts : unit(on = ep_shard, shard_dim = 1)
        (gate_up_proj [8, 128, 512], because 16 ranks cannot share 8 rows)
        (down_proj [8, 16, 2048])
    """
    section = plan.fsdp
    if section is None or not section.shard or {"fsdp", "tensor"} & plan.broken:
        return plan
    if all(part.shard_dim != AUTO for part in section.parts):
        return plan
    assignments = list(owned_modules(plan, facts))
    units = tuple(_with_shard_dim(u, assignments, section, plan, sink) for u in section.units)
    spreads = tuple(_with_shard_dim(s, assignments, section, plan, sink) for s in section.spreads)
    return replace(plan, fsdp=replace(section, units=units, spreads=spreads))


def _with_shard_dim(
    part: UnitOrSpread, assignments: list[Owned], section: Fsdp, plan: Plan, sink: Sink
) -> UnitOrSpread:
    if part.shard_dim != AUTO:
        return part
    ranks = plan.mesh.size(*section.axes(part)[0])
    shapes = dict(placed_parameters(part, assignments, plan))
    dim = even_dim(list(shapes.values()), ranks)
    if dim is None:
        short = [(n, s) for n, s in shapes.items() if len(s) > 1 and s[0] < ranks]
        sink.error(
            "PL382",
            f"`shard_dim = auto` finds no dim to split over {ranks:,} ranks",
            part.origin,
            facts=[f"{name} is {list(shape)} on a rank" for name, shape in short[:3]],
            help="a dim other than the first must divide; name fewer axes by `on = ...`",
        )
        return part
    return replace(part, shard_dim=dim)


def even_dim(shapes: Sequence[tuple[int, ...]], ranks: int) -> int | None:
    """The value of `shard_dim = auto`: 0 where every rank gets rows of every parameter, as torch
    pads dim 0 and all-gathers the padding; else a dim that is divisible in all shorter ones, or
    None.
    """
    short = [s for s in shapes if len(s) > 1 and s[0] < ranks]
    if not short:
        return 0
    for dim in range(1, max(map(len, short))):
        if all(len(s) > dim and s[dim] % ranks == 0 for s in short):
            return dim
    return None
