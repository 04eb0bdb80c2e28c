"""Lays what ranks that hang have written beside the order in which their plan calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planc.lowering.rank_calls import WAIT, Groups, RankCall, pipeline_rank_of
from planc.ops import phrases
from planc.ops.claims import MESSAGES
from planc.ops.lowered import Lowered
from planc.tools.order.dumps import RankDump, RecordedCall
from planc.tools.order.match import cycle
from planc.tools.order.record import Order

_REDUCES = {"reduce_scatter": "all_reduce"}
"""The kinds of calls that gloo records under another name."""
_EQUAL = ("all_reduce", "reduce_scatter")
"""Calls in which all ranks have as many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The call that a rank waits in, and its place in the plan.

    Args:
        entry: that it waits in; None where it waits in none.
        planned: the call of the plan that this is, or the next one that the plan has after what the
            rank has called; None where that is not known.
        axes: of the entry's group.
        code: the line of the script.
        error: that the rank has ended with; empty where it runs.
        awaited: the ranks that have not come to the same call.
        left_out: calls of the plan that the rank has not made, and the others of its place have.
    """

    rank: int
    entry: RecordedCall | None
    planned: RankCall | None
    axes: tuple[str, ...] = ()
    code: str = ""
    error: str = ""
    awaited: tuple[int, ...] = ()
    left_out: tuple[RankCall, ...] = ()

    @property
    def has_died(self) -> bool:
        """Whether the rank has ended with an error of its own, in no collective."""
        return bool(self.error) and self.entry is None and self.error != "SIGTERM"

    @property
    def meets(self) -> tuple[tuple[int, ...], int, str, int] | None:
        """Key of the collective that the rank waits in; equal on all ranks that wait in the same
        call. None outside of collectives.
        """
        entry = self.entry
        if entry is None or entry.kind in MESSAGES:
            return None
        return entry.ranks, entry.sequence, entry.kind, entry.numel * (entry.kind in _EQUAL)

    @property
    def what(self) -> str:
        """`all-reduce of 1 fp32 over tp`."""
        entry = self.entry
        if entry is None:
            return ""
        call = RankCall(
            rank=self.rank,
            number=0,
            kind=self._kind(entry),
            ranks=entry.ranks,
            numel=entry.numel,
            dtype=entry.dtype,
            peer=entry.peer,
            axes=self.axes,
        )
        group = f"group {entry.group}" * (not entry.ranks)
        return f"{call.what} over {group or call.over}"

    def _kind(self, entry: RecordedCall) -> str:
        """The plan's, where gloo has recorded it as another."""
        planned = self.planned.kind if self.planned else ""
        return planned if _REDUCES.get(planned) == entry.kind else entry.kind

    @property
    def location(self) -> str:
        """The place in the plan: `backward of model.layers.3; tensor llama.plan:12`."""
        return self.planned.location if self.planned else "not a call of the plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """
    Args:
        ranks: where each rank is that has left a dump.
        absent: ranks that have left none.
        cycle: ranks each of which waits for the next; empty without one.
    """

    lowered: Lowered
    ranks: Mapping[int, Waiting]
    absent: tuple[int, ...]
    cycle: tuple[int, ...]

    @property
    def waits(self) -> list[Waiting]:
        return [waiting for waiting in self.ranks.values() if waiting.entry is not None]


def explain(dumps: Mapping[int, RankDump], lowered: Lowered, order: Order | None) -> Hang:
    """Finds the place of each rank, and the ranks that it waits for.

    Args:
        dumps: by rank.
        order: the calls of the first rank of each pipeline rank; None if they are unknown.
    """
    groups = Groups(lowered)
    waiting_by_rank: dict[int, Waiting] = {}
    for rank, dump in dumps.items():
        planned, left_out = _plan_position(dump, groups, _of_place(order, lowered, rank))
        entry = dump.waits
        waiting_by_rank[rank] = Waiting(
            rank=rank,
            entry=entry,
            planned=planned,
            axes=groups.axes(entry.ranks) if entry else (),
            code=dump.code,
            error=dump.error,
            left_out=left_out,
        )
    usual = Counter(
        (pipeline_rank_of(lowered, rank), waiting.left_out)
        for rank, waiting in waiting_by_rank.items()
    )
    reporting = Counter(pipeline_rank_of(lowered, rank) for rank in waiting_by_rank)
    for rank, waiting in waiting_by_rank.items():
        awaited = (
            tuple(_missing_ranks(waiting, waiting.entry, waiting_by_rank)) if waiting.entry else ()
        )
        place = pipeline_rank_of(lowered, rank)
        # without another rank of the stage nothing says that the calls are expected of this one
        alone = (
            usual[place, waiting.left_out] == 1 and reporting[place] > 1 and not waiting.has_died
        )
        waiting_by_rank[rank] = replace(
            waiting, awaited=awaited, left_out=waiting.left_out if alone else ()
        )
    graph = {rank: waiting.awaited for rank, waiting in waiting_by_rank.items() if waiting.awaited}
    absent = tuple(rank for rank in range(lowered.world_size) if rank not in dumps)
    return Hang(lowered=lowered, ranks=waiting_by_rank, absent=absent, cycle=cycle(graph))


def _of_place(order: Order | None, lowered: Lowered, rank: int) -> Sequence[RankCall]:
    """The calls of a rank in a step: those of the first rank of its place."""
    if order is None:
        return ()
    place = pipeline_rank_of(lowered, rank)
    first = next(r for r in order.later if order.pipeline_rank(r) == place)
    return [call for call in order.later[first] if call.kind != WAIT]


def _missing_ranks(
    waiting: Waiting, entry: RecordedCall, waiting_by_rank: Mapping[int, Waiting]
) -> Iterator[int]:
    """The ranks of a call that have not come to it; of a message, the other end."""
    if entry.kind in MESSAGES:
        yield from [entry.peer] if entry.peer >= 0 else []
        return
    for rank in entry.ranks:
        other = waiting_by_rank.get(rank)
        if other is None or other.meets != waiting.meets:
            yield rank


# the place in the plan ----------------------------------------------------------------------------

Key = tuple[str, tuple[str, ...]]


def _plan_position(
    dump: RankDump, groups: Groups, calls: Sequence[RankCall]
) -> tuple[RankCall | None, tuple[RankCall, ...]]:
    """The call of the plan that a rank waits in, or that comes next; and the calls before it that
    the rank has left out.

    The last calls of the rank are laid along those of a step, which follow each other again and
    again: the place with the longest run of equal calls before it is where the rank is. Calls that
    the plan has none like, such as those of the script's own metrics, are passed over, and so are
    the sums of `run.metrics`.
    """
    waits = dump.waits
    if waits is not None and _of_metrics(waits, groups, calls):
        return RankCall(rank=dump.rank, number=0, kind=waits.kind, during="sum of run.metrics"), ()
    if waits is not None and waits.kind in MESSAGES:
        forward = waits.peer > dump.rank
        same = (c for c in calls if c.kind == waits.kind and (c.peer > c.rank) == forward)
        return next((c for c in same if c.dtype == waits.dtype), None), ()
    planned = [c for c in calls if not dump.gloo or c.kind not in MESSAGES]
    keys = [_key(c.kind, c.axes, gloo=dump.gloo) for c in planned]
    known = set(keys)
    recorded = []
    for entry in dump.entries:
        key = _key(entry.kind, groups.axes(entry.ranks), gloo=dump.gloo)
        if _of_metrics(entry, groups, calls):
            continue
        if entry.kind not in MESSAGES and (key in known or entry is waits):
            recorded.append((key, entry))
        if entry is waits:
            break
    if not recorded or recorded[-1][0] not in known:
        return None, ()
    best, run = _best(recorded, keys, planned)
    gone: list[RankCall] = []
    if 0 < run < min(len(recorded), len(keys)) and recorded[-run - 1][0] in known:
        before, _ = _best(recorded[:-run], keys, planned)
        between = (best - run - before) % len(keys)
        first = before + 1
        while (
            between and run > 1 and keys[first % len(keys)] == keys[(first + between) % len(keys)]
        ):
            first, run = first + 1, run - 1  # of equal calls, the last ones
        gone = [planned[(first + at) % len(keys)] for at in range(between)]
    here = best if waits is not None else (best + 1) % len(planned)
    return planned[here], tuple(gone)


def _of_metrics(entry: RecordedCall, groups: Groups, calls: Sequence[RankCall]) -> bool:
    """Whether a call is the sum over all ranks of what `run.metrics` counts, which no plan has: of
    more whole numbers than the two by which a step begins.
    """
    size = len(entry.ranks) == groups.lowered.world_size and entry.numel
    counts = entry.kind == "all_reduce" and entry.dtype == "int64" and size > 2
    return counts and not any(c.kind == entry.kind and c.numel == size for c in calls)


def _best(
    recorded: Sequence[tuple[Key, RecordedCall]], keys: Sequence[Key], planned: Sequence[RankCall]
) -> tuple[int, int]:
    """The index in the plan's step of the last of a rank's calls, and the number of equal calls up
    to it.
    """
    at = [place for place, key in enumerate(keys) if key == recorded[-1][0]]
    best = max(at, key=lambda place: _run(recorded, keys, planned, place))
    return best, _run(recorded, keys, planned, best)[0]


def _run(
    recorded: Sequence[tuple[Key, RecordedCall]],
    keys: Sequence[Key],
    planned: Sequence[RankCall],
    at: int,
) -> tuple[int, int]:
    """The number of the last calls that are those of the plan up to a place, and of those of equal
    sizes.
    """
    sizes = 0
    for back, (key, entry) in enumerate(reversed(recorded)):
        place = (at - back) % len(keys)
        if keys[place] != key:
            return back, sizes
        sizes += planned[place].numel == entry.numel
    return len(recorded), sizes


def _key(kind: str, axes: tuple[str, ...], *, gloo: bool) -> Key:
    return (_REDUCES.get(kind, kind) if gloo else kind), axes


# shown --------------------------------------------------------------------------------------------


def lines(hang: Hang) -> Iterator[str]:
    """Describes the calls that the ranks wait in, those in one call together."""
    count = hang.lowered.world_size
    yield f"{len(hang.ranks)} of {count} ranks left a dump"
    if hang.absent:
        why = "ended, stopped, or cut off from the folder"
        if all(waiting.error for waiting in hang.ranks.values()):
            why = "killed, if it is the first that ended: the ranks with a dump ended without it"
        yield f"{_ranks(hang.absent)}: no dump: {why}"
    for waiting in hang.ranks.values():
        if waiting.has_died:
            at = f", at {waiting.code}" if waiting.code else ""
            yield f"rank {waiting.rank}: ended with {waiting.error}{at}"
    for group in sorted(_together(hang.waits), key=lambda group: not group[0].left_out):
        first = group[0]
        yield ""
        yield f"{_ranks([waiting.rank for waiting in group])}: in {first.what}"
        yield f"  {first.location}" + (f"; at {first.code}" if first.code else "")
        for rank in first.awaited:
            yield f"  {_state(rank, hang)}"
        yield from (
            f"  rank {waiting.rank} has ended with {waiting.error}"
            for waiting in group
            if waiting.error
        )
        yield from _left_out(group)
    for waiting in hang.ranks.values():
        if waiting.entry is None and not waiting.has_died:
            yield ""
            at = f", at {waiting.code}" if waiting.code else ""
            yield f"rank {waiting.rank}: in no collective{at}"
            if waiting.planned:
                yield f"  the plan's next: {waiting.planned.text}"
            yield from _left_out([waiting])
    if hang.cycle:
        circle = " -> ".join(map(str, (*hang.cycle, hang.cycle[0])))
        yield ""
        yield f"each waits for the next: {circle}"


def _together(waits: Sequence[Waiting]) -> Iterator[list[Waiting]]:
    groups: dict[object, list[Waiting]] = {}
    for waiting in waits:
        groups.setdefault(
            (waiting.meets or waiting.rank, waiting.location, waiting.what), []
        ).append(waiting)
    yield from groups.values()


def _left_out(group: Sequence[Waiting]) -> Iterator[str]:
    for waiting in group:
        if waiting.left_out:
            more = f", and {len(waiting.left_out) - 1} more" * (len(waiting.left_out) > 1)
            yield f"  rank {waiting.rank} has left out before it: {waiting.left_out[0].text}{more}"


def _ranks(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def _state(rank: int, hang: Hang) -> str:
    """Describes the place of a rank that others wait for."""
    waiting = hang.ranks.get(rank)
    if waiting is None:
        return f"not there: rank {rank}, which left no dump"
    if waiting.has_died:
        return f"not there: rank {rank}, which has ended with {waiting.error}"
    if waiting.entry is None:
        return f"not there: rank {rank}, which is in no collective"
    return f"not there: rank {rank}, which is in {waiting.what} ({waiting.location})"


def document(hang: Hang) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "world_size": hang.lowered.world_size,
        "mesh": phrases.mesh(hang.lowered.axes),
        "absent": [*hang.absent],
        "cycle": [*hang.cycle],
        "ranks": [
            {
                "rank": waiting.rank,
                "call": waiting.what or None,
                "plan": (waiting.planned.where or None) if waiting.planned else None,
                "line": (waiting.planned.line or None) if waiting.planned else None,
                "code": waiting.code or None,
                "awaits": [*waiting.awaited],
                "error": waiting.error or None,
                "left_out": [call.text for call in waiting.left_out],
            }
            for waiting in hang.ranks.values()
        ],
    }
