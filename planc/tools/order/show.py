"""Writes the order of a step's collectives as text and as JSON: each call once, with counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planc.lowering.rank_calls import WAIT, RankCall, kind_text
from planc.model.facts import DTYPE_BYTES, generic
from planc.ops import phrases
from planc.tools.order.record import Order


@dataclass(frozen=True, slots=True)
class Repeated:
    """Calls that follow each other several times, in other layers or for other microbatches."""

    times: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Single:
    """A call, of any layer: indices of lists are `*`."""

    kind: str
    over: tuple[str, ...]
    ranks: int
    numel: int
    dtype: str
    reduces: str
    where: str
    line: str


Row = Single | Repeated


def rows(calls: Sequence[RankCall]) -> tuple[Row, ...]:
    """The calls in order, without waits; what repeats, once."""
    shown: list[Row] = [_single(call) for call in calls if call.kind != WAIT]
    period = 1
    while period <= len(shown) // 2:
        shorter = _fold(shown, period)
        period = 1 if len(shorter) < len(shown) else period + 1
        shown = shorter
    return tuple(shown)


def _single(call: RankCall) -> Single:
    return Single(
        kind=call.kind,
        over=call.axes,
        ranks=len(call.ranks),
        numel=call.numel,
        dtype=call.dtype,
        reduces=call.reduces,
        where=_generic(call),
        line=call.line,
    )


def _generic(call: RankCall) -> str:
    """The module or unit of a call, with `*` for the index of its layer."""
    units = ", ".join(map(generic, call.unit.split(", ")))
    return replace(call, module=generic(call.module), unit=units).where


def _fold(unfolded: Sequence[Row], period: int) -> list[Row]:
    """Replaces consecutive repetitions of `period` rows by one `Repeated` row."""
    folded: list[Row] = []
    at = 0
    while at < len(unfolded):
        pattern = unfolded[at : at + period]
        times = 1
        while unfolded[at + times * period : at + (times + 1) * period] == pattern:
            times += 1
        if times == 1:
            folded.append(unfolded[at])
            at += 1
            continue
        inner = pattern[0]
        if period == 1 and isinstance(inner, Repeated):
            folded.append(Repeated(times * inner.times, inner.rows))
        else:
            folded.append(Repeated(times, tuple(pattern)))
        at += times * period
    return folded


def lines(order: Order, *, sized: bool) -> Iterator[str]:
    """A table for each pipeline rank.

    Args:
        sized: whether the sizes are for the batch of the command line.
    """
    for rank, calls in order.later.items():
        name = f"pipeline rank {order.pipeline_rank(rank)}" if len(order.later) > 1 else "a rank"
        yield phrases.head("order", f"of the collectives of {name} in a step")
        yield from phrases.table([*_table(rows(calls), sized, "")])


def _table(shown: Sequence[Row], sized: bool, indent: str) -> Iterator[Sequence[str]]:
    for row in shown:
        if isinstance(row, Repeated):
            yield f"{indent}{row.times} x", "", "", ""
            yield from _table(row.rows, sized, indent + "  ")
            continue
        over = " * ".join(row.over) or f"{row.ranks} ranks"
        reduces = f" ({row.reduces})" * bool(row.reduces)
        size = phrases.size(row.numel * DTYPE_BYTES.get(row.dtype, 1)) if sized else ""
        yield f"{indent}{kind_text(row.kind)}{reduces} over {over}", size, row.where, row.line


def document(order: Order) -> dict[str, Any]:
    """The tables as plain data; numbers of elements are those of the rank's input tensor."""
    return {
        "order": [
            {
                "place": order.pipeline_rank(rank),
                "rank": rank,
                "calls": [_plain(r) for r in rows(calls)],
            }
            for rank, calls in order.later.items()
        ]
    }


def _plain(row: Row) -> dict[str, Any]:
    if isinstance(row, Repeated):
        return {"times": row.times, "calls": [_plain(inner) for inner in row.rows]}
    return {
        "kind": row.kind,
        "axes": [*row.over],
        "ranks": row.ranks,
        "numel": row.numel,
        "dtype": row.dtype,
        "reduces": row.reduces or None,
        "where": row.where,
        "line": row.line or None,
    }
