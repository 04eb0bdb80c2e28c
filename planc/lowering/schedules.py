"""The schedule of a pipeline: the passes of each rank in order, and the passes in flight."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from planc.model.cache import entry_name, keep, recall
from planc.ops.pipeline import stages_of_rank

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")
"""The schedules with a formula here; torch makes the lists of the others."""

_OF_TORCH = {
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
_PARTS = {"BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class Pass(NamedTuple):
    """One forward or backward of a micro-batch on one of a rank's stages.

    Args:
        part: of a backward that is split: `I` for the gradients of inputs, `W` of weights.
    """

    forward: bool
    chunk: int
    micro_batch: int
    part: str = ""


class InFlight(NamedTuple):
    """The micro-batches of a rank at the moment at which a backward begins.

    Args:
        held: the micro-batches of each stage.
        waiting: those of them whose inputs have their gradients, and whose weights do not.
        passed: whether the weights of each stage have gradients.
        sent, returned: the micro-batches whose outputs, and whose gradients of inputs, each stage
            has given.
        begins: the backward.
    """

    held: tuple[int, ...]
    waiting: tuple[int, ...]
    passed: tuple[bool, ...]
    sent: tuple[int, ...]
    returned: tuple[int, ...]
    begins: Pass

    @property
    def after_backward(self) -> InFlight:
        """The state at the end of the backward: the weights have gradients, or these are left for
        later.
        """
        chunk, part = self.begins.chunk, self.begins.part
        more = {"I": 1, "W": -1}.get(part, 0)
        waiting = (n + more * (i == chunk) for i, n in enumerate(self.waiting))
        passed = (done or (part != "I" and i == chunk) for i, done in enumerate(self.passed))
        returned = (n + (part != "W" and i == chunk) for i, n in enumerate(self.returned))
        return self._replace(waiting=(*waiting,), passed=(*passed,), returned=(*returned,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimes:
    """
    Args:
        seconds: from the first pass to the last.
        busy: seconds that each rank computes or receives.
    """

    seconds: float
    busy: tuple[float, ...]


@cache
def orders(
    schedule: str, ranks: int, chunks: int, micro_batches: int, rows: tuple[str, ...] = ()
) -> list[list[Pass]]:
    """The passes of each rank, in order; `rows` are the schedule of a file."""
    if rows:
        owned = (stages_of_rank(schedule, i, ranks, ranks * chunks) for i in range(ranks))
        return [[*_passes(row, stages)] for row, stages in zip(rows, owned, strict=True)]
    if schedule in SCHEDULES:
        return [order(schedule, rank, ranks, chunks, micro_batches) for rank in range(ranks)]
    key = entry_name("schedule 1", f"{schedule} {ranks} {chunks} {micro_batches}")
    kept = recall(key)
    if not isinstance(kept, list):
        kept = list(_torch_orders(schedule, ranks, chunks, micro_batches))
        keep(key, kept)
    return [[Pass(*each) for each in row] for row in kept]


def _passes(row: str, local_stages: tuple[int, ...]) -> Iterator[Pass]:
    for stage, part, micro_batch in re.findall(r"(\d+)([FBIW])(\d+)", row):
        half = part if part in "IW" else ""
        yield Pass(part == "F", local_stages.index(int(stage)), int(micro_batch), half)


def _torch_orders(schedule: str, ranks: int, chunks: int, micro: int) -> Iterator[list[Any]]:
    from planc.compat.pipelines import get_schedule_ops

    for rank, actions in enumerate(get_schedule_ops(_OF_TORCH[schedule], ranks, micro, chunks)):
        local_stages = stages_of_rank(schedule, rank, ranks, ranks * chunks)
        flat = [action for a in actions if a for action in (a.sub_actions or (a,))]
        yield [
            (
                kind == "FORWARD",
                local_stages.index(a.stage_index),
                a.microbatch_index,
                _PARTS.get(kind, ""),
            )
            for a in flat
            for kind in [a.computation_type.name]
        ]


def order(schedule: str, rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Pass]:
    """The passes of one rank, in order.

    1F1B (Narayanan et al., 2019) runs as many forwards as ranks follow, then alternates;
    interleaved 1F1B (Narayanan et al., 2021) takes micro-batches in groups of about `ranks`, chunk
    by chunk; GPipe (Huang et al., 2019) runs all forwards first.
    """
    total = micro_batches * chunks
    group = micro_batches // max(1, micro_batches // ranks) if chunks > 1 else ranks

    def nth(i: int, forward: bool) -> Pass:
        chunk = i % (group * chunks) // group
        micro_batch = i // (group * chunks) * group + i % group if chunks > 1 else i
        return Pass(forward, chunk if forward else chunks - 1 - chunk, micro_batch)

    if schedule == "gpipe":
        warm = total
    elif schedule == "interleaved_1f1b" and chunks > 1:
        warm = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * group)
    else:
        warm = min(total, ranks - rank - 1)
    passes = [nth(i, True) for i in range(warm)]
    for i in range(total - warm):
        passes += [nth(warm + i, True), nth(i, False)]
    return passes + [nth(i, False) for i in range(total - warm, total)]


def in_flight(passes: Sequence[Pass], chunks: int) -> list[InFlight]:
    """The micro-batches in flight on a rank each time that a backward pass begins."""
    held, waiting, sent, returned = ([0] * chunks for _ in range(4))
    passed, moments = [False] * chunks, []
    for each in passes:
        if each.forward:
            held[each.chunk] += 1
            sent[each.chunk] += 1
            continue
        counts = (*held,), (*waiting,), (*passed,), (*sent,), (*returned,)
        moments.append(InFlight(*counts, each))
        held[each.chunk] -= each.part != "I"
        waiting[each.chunk] += {"I": 1, "W": -1}.get(each.part, 0)
        passed[each.chunk] |= each.part != "I"
        returned[each.chunk] += each.part != "W"
    return moments


def simulate_schedule(
    schedule: str,
    *,
    ranks: int,
    chunks: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[tuple[float, float]] = (),
    rows: tuple[str, ...] = (),
) -> ScheduleTimes:
    """Runs the passes of all ranks, each after what it depends on.

    Args:
        forward, backward: seconds of each stage's pass; a split backward's halves are equal.
        hops: seconds that a micro-batch takes from each stage but the last one to the next, on
            another rank, and its gradient back; none for no time.
        rows: the schedule of a file.
    """
    lists, stages = orders(schedule, ranks, chunks, micro_batches, rows), ranks * chunks
    stages_by_rank = [stages_of_rank(schedule, rank, ranks, stages) for rank in range(ranks)]
    done: dict[tuple[bool, int, int], float] = {}
    at, clock, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    waiting = set(range(ranks))
    while waiting:
        moved = False
        for rank in tuple(waiting):
            while at[rank] < len(lists[rank]):
                each = lists[rank][at[rank]]
                stage = stages_by_rank[rank][each.chunk]
                before = stage - 1 if each.forward else stage + 1
                first = before < 0 or before == stages or each.part == "W"
                ready = 0.0 if first else done.get((each.forward, before, each.micro_batch))
                if ready is None:
                    break
                takes = (forward if each.forward else backward)[stage] / (2 if each.part else 1)
                if hops and not first and before not in stages_by_rank[rank]:
                    takes += hops[min(stage, before)][0 if each.forward else 1]
                clock[rank] = max(clock[rank], ready) + takes
                busy[rank] += takes
                if each.part != "W":
                    done[each.forward, stage, each.micro_batch] = clock[rank]
                at[rank] += 1
                moved = True
            if at[rank] == len(lists[rank]):
                waiting.discard(rank)
        assert moved or not waiting, "the schedule waits for itself"
    return ScheduleTimes(seconds=max(clock), busy=tuple(busy))
