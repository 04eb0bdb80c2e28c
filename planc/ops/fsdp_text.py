"""The text of FSDP units, and the table of them that `lower` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from planc.ops import phrases
from planc.ops.base import Words
from planc.ops.phrases import AxisSizes

if TYPE_CHECKING:
    from planc.ops.fsdp import FullyShard, Spread


def _copied(axes: tuple[str, ...]) -> str:
    return f"replicated over {phrases.axes(axes)}" if axes else "not replicated"


def resharded(value: bool | int) -> str:
    """What a unit does with its gathered parameters after the forward pass."""
    if value is True:
        return "reshard after forward"
    return "keep" if value is False else f"reshard to {value} after forward"


WORDS: Words = {
    "shard": ("over", lambda axes: phrases.axes(axes) or "none"),
    "replicate": ("", _copied),
    "reshard": ("", resharded),
    "param": ("parameters", phrases.value),
    "reduce": ("gradients", phrases.value),
    "cast_inputs": ("cast inputs", phrases.value),
    "nbytes": ("per rank", phrases.value),
    "group": ("unit", lambda group: group or "alone"),
    "shard_dim": ("dim", phrases.value),
    "pin": ("pinned", phrases.value),
}


def where(of: FullyShard | Spread, mesh: AxisSizes | None) -> str:
    """The axes that parameters are sharded and replicated over."""
    text = f"on {phrases.axes(of.shard or of.replicate, mesh)}"
    if of.shard and of.replicate:
        text += f", replicated over {phrases.axes(of.replicate, mesh)}"
    return text


def along(of: FullyShard | Spread) -> str:
    return f"split along dim {of.shard_dim}" if of.shard_dim else ""


def offloading(op: FullyShard) -> str:
    if not op.offload:
        return ""
    return f", offloaded to {'pinned' if op.pin else 'unpinned'} host memory"


def rows(ops: Sequence[FullyShard]) -> Iterator[tuple[str, str, str, str]]:
    """(unit, reshard, bytes, a precision that differs from the first unit's) for each unit."""
    folded, common = _folded(ops), ops[0].precision
    columns = (
        [f"{times} x " if times > 1 else "" for _, times in folded],
        [phrases.size(op.nbytes) for op, _ in folded],
        [phrases.size(op.gathered) for op, _ in folded],
    )
    widths = [max(map(len, column)) for column in columns]
    for (op, _), *cells in zip(folded, *columns, strict=True):
        times, rest, whole = (c.rjust(w) for c, w in zip(cells, widths, strict=True))
        numbers = f"{times}{rest} per rank, {whole} gathered"
        precision = op.precision if op.precision != common else ""
        yield (
            op.name,
            op.resharding if op.shard else "",
            numbers if op.nbytes or op.gathered else "no parameters of its own",
            ", ".join(filter(None, (precision, along(op)))),
        )


def _folded(ops: Sequence[FullyShard]) -> list[tuple[FullyShard, int]]:
    """(unit, number of units); the groups of one line that have equal sizes are merged."""
    groups: list[tuple[FullyShard, int]] = []
    for op in ops:
        before = groups[-1][0] if groups else None
        both = _joined(before, op) if before and before.group and op.group else None
        if both:
            groups[-1] = (both, groups[-1][1] + 1)
        else:
            groups.append((op, 1 if op.group else len(op.members[0])))
    return groups


def _joined(one: FullyShard, two: FullyShard) -> FullyShard | None:
    """Two groups of blocks in the same lists, merged; None where they differ."""
    if one.place != two.place or len(one.members) != len(two.members):
        return None
    unions = tuple(a.union(b) for a, b in zip(one.members, two.members, strict=True))
    members = tuple(m for m in unions if m is not None)
    joined = replace(one, members=members)
    same = len(members) == len(unions) and replace(two, members=members) == joined
    return joined if same else None
