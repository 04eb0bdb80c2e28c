"""What layers compute and keep for many batches, from counts for a few of them.

All that `kept_tensors` counts is a constant and a multiple of the rows, from two rows on: torch
copies less where a dim has one entry. Where ranks have parts of sequences and see the keys of all,
the constant and the multiple are themselves such sums of the tokens of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from planc.estimate.counted import Counted, MicroBatch

Shape = tuple[int, int]
"""Rows and tokens of a row, of one rank's micro-batch."""
_GATHERED = "all_gather"
_Alike = tuple[str, str, int]
"""The dtype, what attention exchanges, and the tokens of a whole row."""


@dataclass(slots=True)
class DerivedCounts:
    """
    Args:
        run: counts a job, as `kept_tensors.count`.
        first: jobs that are counted before others, for these to follow from them.
    """

    run: Callable[[MicroBatch], Counted | None]
    first: list[MicroBatch] = field(default_factory=list)
    _known: dict[_Alike, dict[Shape, Counted | None]] = field(default_factory=dict)
    _derived: dict[tuple[_Alike, Shape], Counted] = field(default_factory=dict)

    def counted(self, job: MicroBatch) -> Counted | None:
        """The count of a job; None where it cannot be counted."""
        alike, shape = _keys(job)
        known = self._known.setdefault(alike, {})
        if shape not in known:
            known[shape] = self.run(job)
        return known[shape]

    def add(self, job: MicroBatch, one: Counted) -> None:
        """Takes a count that is known already."""
        alike, shape = _keys(job)
        self._known.setdefault(alike, {})[shape] = one

    def derived(self, job: MicroBatch) -> Counted | None:
        """The same, by arithmetic where the counts for other batches are enough."""
        alike, shape = _keys(job)
        parts = job.exchange[0] == _GATHERED
        while (found := self._sum(alike, shape, parts=parts)) is None:
            like = (one for one in self.first if (one.dtype, one.exchange[0]) == alike[:2])
            if (first := next(like, None)) is None:
                return self.counted(job)
            self.first.remove(first)
            self.counted(first)
        return found

    def _sum(self, alike: _Alike, shape: Shape, *, parts: bool) -> Counted | None:
        """The count that follows from known ones, whose tokens may differ if `parts`."""
        if (alike, shape) in self._derived:
            return self._derived[alike, shape]
        like = {
            (rows, tokens): one
            for (rows, tokens), one in self._known.get(alike, {}).items()
            if one and (rows > 1) == (shape[0] > 1) and (parts or tokens == shape[1])
        }
        if shape in like:
            return like[shape]
        if weights := _weights([*like], shape):
            with suppress(ValueError):
                data = _sum(weights, [one.document() for one in like.values()])
                self._derived[alike, shape] = Counted.of(data)
        return self._derived.get((alike, shape))


def first_jobs(dtype: str, tokens: int, exchange: str) -> list[MicroBatch]:
    """From whose counts most others follow.

    Args:
        tokens: of a row.
        exchange: what attention exchanges between parts of a row; empty where there are none.
    """
    jobs = [MicroBatch(rows, tokens, dtype) for rows in (1, 2, 4)]
    if exchange == _GATHERED:
        ways = [(2, 2), (1, 2), (4, 4), (1, 4), (4, 2), (2, 4)]
        jobs += [
            MicroBatch(rows, tokens // n, dtype, (exchange, n))
            for rows, n in ways
            if tokens % n == 0
        ]
    return jobs


def _keys(job: MicroBatch) -> tuple[_Alike, Shape]:
    kind, parts = job.exchange
    return (job.dtype, kind, job.tokens * parts), (job.rows, job.tokens)


def _weights(shapes: Sequence[Shape], wanted: Shape) -> list[Fraction]:
    """How often the counts for each shape make that for another; empty where they are too few.

    The shapes' terms (1, rows, tokens, rows x tokens), so multiplied, sum to those of the other.
    """
    columns = [(1, rows, tokens, rows * tokens) for rows, tokens in (*shapes, wanted)]
    left = [[Fraction(n) for n in row] for row in zip(*columns, strict=True)]
    solved: dict[int, list[Fraction]] = {}
    for at in range(len(shapes)):
        if pivot := next((row for row in left if row[at]), None):
            left.remove(pivot)
            solved[at] = [n / pivot[at] for n in pivot]
            for other in (*left, *(solved[i] for i in solved if i != at)):
                share = other[at]
                other[:] = [n - share * m for n, m in zip(other, solved[at], strict=True)]
    if any(row[-1] for row in left):
        return []
    return [solved[at][-1] if at in solved else Fraction() for at in range(len(shapes))]


def _sum(weights: Sequence[Fraction], every: Sequence[Any]) -> Any:
    """The weighted sum of plain data.

    Raises:
        ValueError: they differ in more than numbers, or a sum is not a whole number.
    """
    first = every[0]
    if type(first) is int:
        if len({*every}) == 1:  # the weights' sum is 1
            return first
        total = sum((w * n for w, n in zip(weights, every, strict=True) if w), Fraction())
        if total.denominator == 1:
            return int(total)
    elif isinstance(first, dict):
        return {k: _sum(weights, [each[k] for each in every]) for k in first}
    elif isinstance(first, list | tuple):
        return [_sum(weights, parts) for parts in zip(*every, strict=True)]
    elif all(each == first for each in every):
        return first
    raise ValueError("the counts differ in more than numbers, or are no multiples")
