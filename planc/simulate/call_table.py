"""The calls of one block's forward pass on one rank, and which of them are best kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from planc.ops.activation_checkpoint import GROUPS, Save

FLOPS, MEMORY, LINK = 720e12, 2800e9, 330e9
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
        seconds: that its recomputation takes, and copies to the host's memory and back.
        kept: the calls whose results are kept; None for a block that is not checkpointed.
        hosted: those whose results are kept in the host's memory.
        away: bytes of these.
    """

    size: int
    seconds: float
    kept: tuple[int, ...] | None
    hosted: tuple[int, ...] = ()
    away: int = 0


@dataclass(frozen=True)
class CallTable:
    """
    Args:
        calls: in order.
        stop: the number of calls that a recomputation runs: it ends when autograd has all it needs.
        inputs: bytes of the block's input, which a checkpoint holds.
        saved: bytes that autograd holds of a block without a checkpoint.
        host: bytes in a second that the link to the host's memory moves each way; 0 where no result
            is kept there.
    """

    calls: tuple[CountedCall, ...]
    stop: int
    inputs: int
    saved: int
    host: float = 0.0

    @classmethod
    def from_data(cls, data: Any) -> CallTable:
        """Reads the data that `planc.tools.measure.calls` writes. Raises on any other data."""
        calls = tuple(CountedCall(*call) for call in data["calls"])
        return cls(calls, data["stop"], data["inputs"], data["saved"])

    @cached_property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return sum(call.seconds for call in self.calls)

    def copy_seconds(self, call: CountedCall) -> float:
        """Seconds to copy a result to the host's memory and back: nothing runs meanwhile, as the
        stream that computes makes the copies.
        """
        return 2 * call.size / self.host if self.host else inf

    def moves(self, call: CountedCall) -> bool:
        """Whether a result is sooner copied than computed again. Causal attention computes half of
        the square that is counted.
        """
        return self.copy_seconds(call) < call.seconds / (2 if call.op == "attention" else 1)

    def point(self, kept: Iterable[int], hosted: Iterable[int] = ()) -> Point:
        """The block with the results of these calls kept, some of them in the host's memory."""
        chosen, away = {*kept}, {*hosted}
        size = self.inputs + sum(self.calls[i].size for i in chosen)
        others = {*range(self.stop)} - chosen - away
        seconds = sum(self.calls[i].seconds for i in sorted(others))
        seconds += sum(self.copy_seconds(self.calls[i]) for i in sorted(away))
        there = sum(self.calls[i].size for i in away)
        return Point(size, seconds, tuple(sorted(chosen)), tuple(sorted(away)), there)

    def keeping(self, saves: Sequence[Save]) -> Point:
        """The block under a list of what to save, as a plan or a person wrote it."""
        kept: list[int] = []
        away: list[int] = []
        for save in saves:
            numbers = [i for i, c in enumerate(self.calls) if c.op == save.name or c.op in save.ops]
            for nth in save.calls or range(0, len(numbers), save.every):
                if nth < len(numbers) and self.calls[numbers[nth]].size:
                    (away if nth in save.hosted else kept).append(numbers[nth])
        return self.point(kept, away)

    def running(self, saves: Sequence[Save]) -> Iterator[tuple[bool, CountedCall]]:
        """Yields each call, with whether a recomputation runs it."""
        point = self.keeping(saves)
        kept = {*(point.kept or ()), *point.hosted}
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
        and Ullmann, 1969). A call that is sooner copied than computed takes no bytes in the host's
        memory, so it is there or kept, and keeping it saves the copies.
        """
        items = [
            (i, call)
            for i, call in enumerate(self.calls[: self.stop])
            if not call.fixed and call.seconds > 0 and call.size < self.saved
        ]
        away = {i for i, call in items if self.moves(call)}
        gains = {i: self.copy_seconds(call) if i in away else call.seconds for i, call in items}
        states: list[tuple[int, float, int]] = [(0, 0.0, 0)]
        for i, call in sorted(items, key=lambda item: item[1].size / gains[item[0]]):
            more = [(b + call.size, s + gains[i], k | 1 << i) for b, s, k in states]
            states = _pareto_front(sorted([*states, *more], key=lambda x: (x[0], -x[1])))
        chosen = (tuple(i for i, _ in items if k >> i & 1) for _, _, k in states)
        points = [self.point(kept, away - {*kept}) for kept in chosen]
        least = min((p.size for p in points if not p.seconds), default=self.saved)
        points = [p for p in points if p.size < min(self.saved, least + 1)]
        return (*points, self.plain) if self.saved < least + 1 else tuple(points)

    def saves(self, point: Point) -> tuple[Save, ...]:
        """The `save` argument of a checkpoint that saves the calls of a point."""
        numbers: dict[str, list[int]] = {}
        away: dict[str, list[int]] = {}
        for i in sorted((*(point.kept or ()), *point.hosted)):
            numbers.setdefault(self.calls[i].op, []).append(self.calls[i].nth)
        for i in point.hosted:
            away.setdefault(self.calls[i].op, []).append(self.calls[i].nth)
        return tuple(
            Save(
                name=op,
                ops=GROUPS.get(op, (op,)),
                calls=tuple(numbers[op]),
                hosted=tuple(away.get(op, ())),
            )
            for op in sorted(numbers)
        )


def _pareto_front(states: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    front: list[tuple[int, float, int]] = []
    top = -1.0
    for state in states:
        if state[1] > top + 1e-15:
            front.append(state)
            top = state[1]
    if len(front) <= MOST:
        return front
    step = front[-1][0] / MOST
    groups: dict[int, tuple[int, float, int]] = {}
    for state in front:  # within a step of bytes the last one saves most; the first one stays
        groups[int(state[0] / step) + (state[0] > 0)] = state
    return [*groups.values()]
