"""Writes the collectives of a step and their communication volume, as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planc.lowering.collectives import left_out, step_collectives
from planc.lowering.step import Sent, Step
from planc.ops import phrases


def lines(step: Step) -> Iterator[str]:
    """A line for each kind of collective of an operation."""
    collectives = step_collectives(step)
    yield phrases.head("sends", "in a step, of a rank that runs it" if collectives else "nothing")
    yield from phrases.table(_row(sent, step) for sent in collectives)
    for name in left_out(step):
        yield phrases.head("", f"not counted: {name}")


def _row(sent: Sent, step: Step) -> Sequence[str]:
    over = phrases.axes(sent.axes, step.lowered)
    if sent.among is not None:
        ranks, stride = sent.among
        over = f"{ranks} of {over}" + f", {stride} apart" * (stride > 1)
    times, size = f"{sent.times:,} x", "?" if sent.size is None else phrases.size(sent.size)
    total = "" if sent.size is None else phrases.size(sent.times * sent.size)
    return sent.word, sent.where, f"{sent.kind} over {over}", times, size, total


def document(step: Step) -> dict[str, Any]:
    """The collectives as plain data: bytes of one, or null if unknown; and what is not counted."""
    rows = [
        {
            "operation": sent.word,
            "where": sent.where,
            "kind": sent.kind,
            "axes": [*sent.axes],
            "times": sent.times,
            "bytes": sent.size,
            **({"among": [*sent.among]} if sent.among else {}),
        }
        for sent in step_collectives(step)
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
    sums: dict[tuple[str, str, tuple[str, ...]], tuple[int, int | None]] = {}
    for sent in step_collectives(step):
        key = (sent.word, sent.kind, sent.axes)
        times, size = sums.get(key, (0, 0))
        total = None if size is None or sent.size is None else size + sent.times * sent.size
        sums[key] = times + sent.times, total
    return sums


def _totals(sums: tuple[int, int | None] | None) -> str:
    if sums is None:
        return "none"
    times, size = sums
    return f"{times:,}" if size is None else f"{times:,}, {phrases.size(size)}"
