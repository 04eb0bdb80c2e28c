"""What layers compute and keep for many batches, from counts for a few of them.

All that `kept_tensors` counts is a constant and a multiple of the rows, from two rows on: torch
copies less where a dim has one entry. Where ranks have parts of sequences and see the keys of all,
it is the same of the tokens of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from planc.estimate.counted import Counted, MicroBatch

_ENDS = (2, 4)
"""The rows, and the parts of a sequence, between and beyond which counts are on a line."""


@dataclass(slots=True)
class DerivedCounts:
    """The counts of jobs, each known once; `run` counts a job, as `kept_tensors.count`."""

    run: Callable[[MicroBatch], Counted | None]
    _counted: dict[MicroBatch, Counted | None] = field(default_factory=dict)
    _derived: dict[MicroBatch, Counted | None] = field(default_factory=dict)

    def counted(self, job: MicroBatch) -> Counted | None:
        """The count of a job; None where it cannot be counted."""
        if job not in self._counted:
            self._counted[job] = self.run(job)
        return self._counted[job]

    def derived(self, job: MicroBatch) -> Counted | None:
        """The same, by arithmetic where the counts for other batches are enough."""
        if job not in self._derived:
            self._derived[job] = self._on_line(job) or self.counted(job)
        return self._derived[job]

    def _on_line(self, job: MicroBatch) -> Counted | None:
        """The count that follows from those for two other numbers of rows, or of parts."""
        (kind, parts), total = job.exchange, job.tokens * job.exchange[1]
        if job.rows not in (1, *_ENDS):
            ends = [job._replace(rows=rows) for rows in _ENDS]
            share = Fraction(job.rows - _ENDS[0], _ENDS[1] - _ENDS[0])
        elif kind == "all_gather" and parts not in _ENDS and not total % _ENDS[1]:
            ends = [job._replace(tokens=total // n, exchange=(kind, n)) for n in _ENDS]
            share = Fraction(job.tokens - ends[0].tokens, ends[1].tokens - ends[0].tokens)
        else:
            return None
        one, two = map(self.derived, ends)
        if one and two:
            with suppress(ValueError):
                return Counted.of(_between(one.document(), two.document(), share))
        return None


def _between(one: Any, two: Any, share: Fraction) -> Any:
    """Plain data, each of whose numbers is that share of the way from the one to the other.

    Raises:
        ValueError: they differ in more than numbers, or one is not a whole number.
    """
    if type(one) is int:
        made = one + (two - one) * share
        if made.denominator == 1:
            return int(made)
    elif isinstance(one, dict):
        return {key: _between(one[key], two[key], share) for key in one}
    elif isinstance(one, list | tuple):
        return [_between(a, b, share) for a, b in zip(one, two, strict=True)]
    elif one == two:
        return one
    raise ValueError("the counts differ in more than numbers, or are no multiples")
