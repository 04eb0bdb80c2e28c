"""The calls of one block's forward pass on one rank, and which of them are best kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from planc.ops.activation_checkpoint import GROUPS, Save

FLOPS, MEMORY, LINK = 720e12, 2800e9, 250e9
"""FLOPs, bytes of memory and bytes of collectives in a second: those of the profile `h100-8x`. What
is kept depends on their ratios alone, and must be the same on every machine.
"""
MOST = 1 << 12
"""States of a knapsack, at most: above, of those within this part of the bytes the one that saves
most stays. Blocks of llama have about a thousand.
"""


class CountedCall(NamedTuple):
    """
    Args:
        op: the operator, or `attention` for all of its kernels.
        nth: which call of it this is, from 0.
        size: bytes of new memory.
        flops, moved, sent: its work: FLOPs, bytes read and written, and bytes of a collective.
        fixed: whether its result cannot be kept: it draws random numbers, is written into later, is
            a view, or is the block's own result.
    """

    op: str
    nth: int
    size: int
    flops: int
    moved: int
    sent: int
    fixed: bool

    @property
    def seconds(self) -> float:
        return max(self.flops / FLOPS, self.moved / MEMORY) + self.sent / LINK


class Point(NamedTuple):
    """A way to checkpoint a block.

    Args:
        size: bytes that it holds until its backward pass, its input included.
        seconds: that its recomputation takes.
        kept: the calls whose results are kept; None for a block that is not checkpointed.
    """

    size: int
    seconds: float
    kept: tuple[int, ...] | None


@dataclass(frozen=True)
class CallTable:
    """
    Args:
        calls: in order.
        stop: the number of calls that a recomputation runs: it ends when autograd has all it needs.
        inputs: bytes of the block's input, which a checkpoint holds.
        saved: bytes that autograd holds of a block without a checkpoint.
    """

    calls: tuple[CountedCall, ...]
    stop: int
    inputs: int
    saved: int

    @classmethod
    def of(cls, data: Any) -> CallTable:
        """Of the data that `planc.measure.calls` gives. Raises at any other."""
        calls = tuple(CountedCall(*call) for call in data["calls"])
        return cls(calls, data["stop"], data["inputs"], data["saved"])

    @cached_property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return sum(call.seconds for call in self.calls)

    def point(self, kept: Iterable[int]) -> Point:
        """The block with the results of these calls kept."""
        chosen = {*kept}
        size = self.inputs + sum(self.calls[i].size for i in chosen)
        again = (c.seconds for i, c in enumerate(self.calls[: self.stop]) if i not in chosen)
        return Point(size, sum(again), tuple(sorted(chosen)))

    def keeping(self, saves: Sequence[Save]) -> Point:
        """The block under a list of what to save, as a plan or a person wrote it."""
        kept = []
        for save in saves:
            own = [i for i, c in enumerate(self.calls) if c.op == save.name or c.op in save.ops]
            chosen = save.calls or range(0, len(own), save.every)
            kept += [own[i] for i in chosen if i < len(own) and self.calls[own[i]].size]
        return self.point(kept)

    def running(self, saves: Sequence[Save]) -> Iterator[tuple[bool, CountedCall]]:
        """Yields each call, with whether a recomputation runs it."""
        kept = {*(self.keeping(saves).kept or ())}
        for i, call in enumerate(self.calls):
            yield i < self.stop and i not in kept, call

    @cached_property
    def plain(self) -> Point:
        """The block without a checkpoint."""
        return Point(self.saved, 0.0, None)

    @cached_property
    def front(self) -> tuple[Point, ...]:
        """The best ways to checkpoint, by bytes: each takes more than those before, and less time.

        torch runs every call again that is not kept, so what keeping one saves is its own time,
        whatever else is kept: a 0/1 knapsack, solved exactly by its undominated states (Nemhauser
        and Ullmann, 1969).
        """
        items = [
            (i, call)
            for i, call in enumerate(self.calls[: self.stop])
            if not call.fixed and call.seconds > 0 and call.size < self.saved
        ]
        states: list[tuple[int, float, int]] = [(0, 0.0, 0)]
        for i, call in sorted(items, key=lambda item: item[1].size / item[1].seconds):
            more = [(b + call.size, s + call.seconds, k | 1 << i) for b, s, k in states]
            states = _undominated(sorted([*states, *more], key=lambda x: (x[0], -x[1])))
        chosen = (tuple(i for i, _ in items if k >> i & 1) for _, _, k in states)
        points = [*map(self.point, chosen)]
        least = min((p.size for p in points if not p.seconds), default=self.saved)
        points = [p for p in points if p.size < min(self.saved, least + 1)]
        return (*points, self.plain) if self.saved < least + 1 else tuple(points)

    def saves(self, point: Point) -> tuple[Save, ...]:
        """What a checkpoint saves that keeps the calls of a point."""
        numbers: dict[str, list[int]] = {}
        for i in point.kept or ():
            numbers.setdefault(self.calls[i].op, []).append(self.calls[i].nth)
        return tuple(
            Save(name=op, ops=GROUPS.get(op, (op,)), calls=tuple(numbers[op]))
            for op in sorted(numbers)
        )


def _undominated(states: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    found: list[tuple[int, float, int]] = []
    top = -1.0
    for state in states:
        if state[1] > top + 1e-15:
            found.append(state)
            top = state[1]
    if len(found) <= MOST:
        return found
    step = found[-1][0] / MOST
    groups: dict[int, tuple[int, float, int]] = {}
    for state in found:  # within a step of bytes the last one saves most; the first one stays
        groups[int(state[0] / step) + (state[0] > 0)] = state
    return [*groups.values()]
