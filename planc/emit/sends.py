"""Writes the collectives of a step and their communication volume, as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planc.lowering.sends import left_out, sends
from planc.lowering.step import Sent, Step
from planc.ops import phrases


def lines(step: Step) -> Iterator[str]:
    """A line for each kind of collective of an operation."""
    found = sends(step)
    yield phrases.head("sends", "in a step, of a rank that runs it" if found else "nothing")
    yield from phrases.table(_row(one, step) for one in found)
    for name in left_out(step):
        yield phrases.head("", f"not counted: {name}")


def _row(one: Sent, step: Step) -> Sequence[str]:
    over = phrases.axes(one.axes, step.lowered)
    if one.among is not None:
        ranks, every = one.among
        over = f"{ranks} of {over}" + f", {every} apart" * (every > 1)
    times, size = f"{one.times:,} x", "?" if one.size is None else phrases.size(one.size)
    total = "" if one.size is None else phrases.size(one.times * one.size)
    return one.word, one.where, f"{one.kind} over {over}", times, size, total


def document(step: Step) -> dict[str, Any]:
    """The collectives as plain data: bytes of one, or null if unknown; and what is not counted."""
    rows = [
        {
            "operation": one.word,
            "where": one.where,
            "kind": one.kind,
            "axes": [*one.axes],
            "times": one.times,
            "bytes": one.size,
            **({"among": [*one.among]} if one.among else {}),
        }
        for one in sends(step)
    ]
    return {"sends": rows, "not_counted": [*left_out(step)]}


def changes(sides: Mapping[str, Step]) -> Iterator[str]:
    """Yields the collectives that a change of a plan adds or removes, or whose volume it changes.

    Args:
        sides: `old` and `new`.
    """
    old, new = (_sums(sides[side]) for side in ("old", "new"))
    for key in dict.fromkeys((*old, *new)):
        before, after = (_totals(side.get(key)) for side in (old, new))
        if before != after:
            word, kind, axes = key
            yield f"sends: {word} {kind} over {phrases.axes(axes)}: {before} -> {after}"


def _sums(step: Step) -> dict[tuple[str, str, tuple[str, ...]], tuple[int, int | None]]:
    found: dict[tuple[str, str, tuple[str, ...]], tuple[int, int | None]] = {}
    for one in sends(step):
        key = (one.word, one.kind, one.axes)
        times, size = found.get(key, (0, 0))
        total = None if size is None or one.size is None else size + one.times * one.size
        found[key] = times + one.times, total
    return found


def _totals(sums: tuple[int, int | None] | None) -> str:
    if sums is None:
        return "none"
    times, size = sums
    return f"{times:,}" if size is None else f"{times:,}, {phrases.size(size)}"
