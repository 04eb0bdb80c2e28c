"""The timetable of a pipeline: which rank runs which pass when, and how much waits in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")


class Pass(NamedTuple):
    """One forward or backward of a micro-batch on one of a rank's stages."""

    forward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """
    Args:
        seconds: from the first pass to the last.
        busy: seconds that each rank computes or receives.
    """

    seconds: float
    busy: tuple[float, ...]


def order(schedule: str, rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Pass]:
    """The passes of one rank, in order.

    1F1B (Narayanan et al., 2019) runs as many forwards as ranks follow, then alternates;
    interleaved 1F1B (Narayanan et al., 2021) takes micro-batches in groups of `ranks`, chunk by
    chunk; GPipe (Huang et al., 2019) runs all forwards first.
    """
    total = micro_batches * chunks
    group = ranks * chunks

    def nth(i: int, forward: bool) -> Pass:
        chunk = i % group // ranks
        micro_batch = i // group * ranks + i % ranks if chunks > 1 else i
        return Pass(forward, chunk if forward else chunks - 1 - chunk, micro_batch)

    if schedule == "gpipe":
        warm = total
    elif schedule == "interleaved_1f1b" and chunks > 1:
        warm = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
    else:
        warm = min(total, ranks - rank - 1)
    passes = [nth(i, True) for i in range(warm)]
    for i in range(total - warm):
        passes += [nth(warm + i, True), nth(i, False)]
    return passes + [nth(i, False) for i in range(total - warm, total)]


def in_flight(passes: Sequence[Pass], chunks: int) -> list[tuple[int, ...]]:
    """For each moment at which a forward ended: how many micro-batches each chunk holds."""
    held, found = [0] * chunks, []
    for each in passes:
        held[each.chunk] += 1 if each.forward else -1
        if each.forward:
            found.append(tuple(held))
    return found


def timetable(
    schedule: str,
    *,
    ranks: int,
    chunks: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    hop: float,
) -> Timetable:
    """Runs the passes of all ranks, each after what it depends on.

    Args:
        forward, backward: seconds of each stage's pass; stage `chunk * ranks + rank`.
        hop: seconds to receive a micro-batch from the stage before or after.
    """
    orders = [order(schedule, r, ranks, chunks, micro_batches) for r in range(ranks)]
    stages = ranks * chunks
    done: dict[tuple[bool, int, int], float] = {}
    at, clock, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    waiting = set(range(ranks))
    while waiting:
        moved = False
        for rank in tuple(waiting):
            while at[rank] < len(orders[rank]):
                each = orders[rank][at[rank]]
                stage = each.chunk * ranks + rank
                before = stage - 1 if each.forward else stage + 1
                first = before < 0 or before == stages
                ready = 0.0 if first else done.get((each.forward, before, each.micro_batch))
                if ready is None:
                    break
                takes = (forward if each.forward else backward)[stage] + (0.0 if first else hop)
                clock[rank] = max(clock[rank], ready) + takes
                busy[rank] += takes
                done[each.forward, stage, each.micro_batch] = clock[rank]
                at[rank] += 1
                moved = True
            if at[rank] == len(orders[rank]):
                waiting.discard(rank)
        assert moved or not waiting, "the schedule waits for itself"
    return Timetable(seconds=max(clock), busy=tuple(busy))
