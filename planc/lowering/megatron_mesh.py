"""The mesh that Megatron-FSDP is given: the data axes, and a tensor dimension that it must have."""

from __future__ import annotations

from planc.ops.lowered import Lowered
from planc.ops.megatron_fsdp import MegatronShard

ONE = "tp_of_one"
"""The tensor dimension: `FSDPDistributedIndex` asks for one, if only of one rank."""


def layout(
    op: MegatronShard, lowered: Lowered
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """The dimensions of the package's mesh: names, sizes, and the order of the plan's axes.

    Axes of one rank go last, where they change nothing.
    """
    groups = [op.replicate] if op.replicate else []
    groups.append(tuple(a.name for a in lowered.axes if a.name in op.shard))
    names = ("_".join(group) for group in groups)
    sizes = (lowered.axis_size(*group) for group in groups)
    known = [a.name for a in lowered.axes]
    used = [known.index(name) for group in groups for name in group]
    rest = [i for i in range(len(known)) if i not in used]
    wide = [i for i in used if lowered.axes[i].size > 1]
    order = tuple(range(len(known))) if wide == sorted(wide) else (*used, *rest)
    return (*names, ONE), (*sizes, 1), order
