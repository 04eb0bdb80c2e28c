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
        one = self.entry
        if one is None or one.kind in MESSAGES:
            return None
        return one.ranks, one.sequence, one.kind, one.numel * (one.kind in _EQUAL)

    @property
    def what(self) -> str:
        """`all-reduce of 1 fp32 over tp`."""
        one = self.entry
        if one is None:
            return ""
        call = RankCall(
            rank=self.rank,
            number=0,
            kind=self._kind(one),
            ranks=one.ranks,
            numel=one.numel,
            dtype=one.dtype,
            peer=one.peer,
            axes=self.axes,
        )
        group = f"group {one.group}" * (not one.ranks)
        return f"{call.what} over {group or call.over}"

    def _kind(self, one: RecordedCall) -> str:
        """The plan's, where gloo has recorded it as another."""
        own = self.planned.kind if self.planned else ""
        return own if _REDUCES.get(own) == one.kind else one.kind

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
        return [one for one in self.ranks.values() if one.entry is not None]


def explain(dumps: Mapping[int, RankDump], lowered: Lowered, order: Order | None) -> Hang:
    """Finds the place of each rank, and the ranks that it waits for.

    Args:
        dumps: by rank.
        order: the calls of the first rank of each pipeline rank; None if they are unknown.
    """
    groups = Groups(lowered)
    found: dict[int, Waiting] = {}
    for rank, dump in dumps.items():
        planned, left_out = _plan_position(dump, groups, _of_place(order, lowered, rank))
        entry = dump.waits
        found[rank] = Waiting(
            rank=rank,
            entry=entry,
            planned=planned,
            axes=groups.axes(entry.ranks) if entry else (),
            code=dump.code,
            error=dump.error,
            left_out=left_out,
        )
    usual = Counter((pipeline_rank_of(lowered, rank), one.left_out) for rank, one in found.items())
    reporting = Counter(pipeline_rank_of(lowered, rank) for rank in found)
    for rank, one in found.items():
        awaited = tuple(_missing_ranks(one, one.entry, found)) if one.entry else ()
        place = pipeline_rank_of(lowered, rank)
        # without another rank of the stage nothing says that the calls are expected of this one
        alone = usual[place, one.left_out] == 1 and reporting[place] > 1 and not one.has_died
        found[rank] = replace(one, awaited=awaited, left_out=one.left_out if alone else ())
    graph = {rank: one.awaited for rank, one in found.items() if one.awaited}
    absent = tuple(rank for rank in range(lowered.world_size) if rank not in dumps)
    return Hang(lowered=lowered, ranks=found, absent=absent, cycle=cycle(graph))


def _of_place(order: Order | None, lowered: Lowered, rank: int) -> Sequence[RankCall]:
    """The calls of a rank in a step: those of the first rank of its place."""
    if order is None:
        return ()
    place = pipeline_rank_of(lowered, rank)
    first = next(r for r in order.later if order.pipeline_rank(r) == place)
    return [call for call in order.later[first] if call.kind != WAIT]


def _missing_ranks(
    one: Waiting, entry: RecordedCall, every: Mapping[int, Waiting]
) -> Iterator[int]:
    """The ranks of a call that have not come to it; of a message, the other end."""
    if entry.kind in MESSAGES:
        yield from [entry.peer] if entry.peer >= 0 else []
        return
    for rank in entry.ranks:
        other = every.get(rank)
        if other is None or other.meets != one.meets:
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
    own = []
    for entry in dump.entries:
        key = _key(entry.kind, groups.axes(entry.ranks), gloo=dump.gloo)
        if _of_metrics(entry, groups, calls):
            continue
        if entry.kind not in MESSAGES and (key in known or entry is waits):
            own.append((key, entry))
        if entry is waits:
            break
    if not own or own[-1][0] not in known:
        return None, ()
    best, run = _best(own, keys, planned)
    gone: list[RankCall] = []
    if 0 < run < min(len(own), len(keys)) and own[-run - 1][0] in known:
        before, _ = _best(own[:-run], keys, planned)
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
    own: Sequence[tuple[Key, RecordedCall]], keys: Sequence[Key], planned: Sequence[RankCall]
) -> tuple[int, int]:
    """The index in the plan's step of the last of a rank's calls, and the number of equal calls up
    to it.
    """
    at = [place for place, key in enumerate(keys) if key == own[-1][0]]
    best = max(at, key=lambda place: _run(own, keys, planned, place))
    return best, _run(own, keys, planned, best)[0]


def _run(
    own: Sequence[tuple[Key, RecordedCall]],
    keys: Sequence[Key],
    planned: Sequence[RankCall],
    at: int,
) -> tuple[int, int]:
    """The number of the last calls that are those of the plan up to a place, and of those of equal
    sizes.
    """
    sizes = 0
    for back, (key, entry) in enumerate(reversed(own)):
        place = (at - back) % len(keys)
        if keys[place] != key:
            return back, sizes
        sizes += planned[place].numel == entry.numel
    return len(own), sizes


def _key(kind: str, axes: tuple[str, ...], *, gloo: bool) -> Key:
    return (_REDUCES.get(kind, kind) if gloo else kind), axes


# shown --------------------------------------------------------------------------------------------


def lines(found: Hang) -> Iterator[str]:
    """Describes the calls that the ranks wait in, those in one call together."""
    count = found.lowered.world_size
    yield f"{len(found.ranks)} of {count} ranks left a dump"
    if found.absent:
        why = "ended, stopped, or cut off from the folder"
        if all(one.error for one in found.ranks.values()):
            why = "killed, if it is the first that ended: the ranks with a dump ended without it"
        yield f"{_ranks(found.absent)}: no dump: {why}"
    for one in found.ranks.values():
        if one.has_died:
            at = f", at {one.code}" if one.code else ""
            yield f"rank {one.rank}: ended with {one.error}{at}"
    for some in sorted(_together(found.waits), key=lambda some: not some[0].left_out):
        first = some[0]
        yield ""
        yield f"{_ranks([one.rank for one in some])}: in {first.what}"
        yield f"  {first.location}" + (f"; at {first.code}" if first.code else "")
        for rank in first.awaited:
            yield f"  {_state(rank, found)}"
        yield from (f"  rank {one.rank} has ended with {one.error}" for one in some if one.error)
        yield from _left_out(some)
    for one in found.ranks.values():
        if one.entry is None and not one.has_died:
            yield ""
            at = f", at {one.code}" if one.code else ""
            yield f"rank {one.rank}: in no collective{at}"
            if one.planned:
                yield f"  the plan's next: {one.planned.text}"
            yield from _left_out([one])
    if found.cycle:
        circle = " -> ".join(map(str, (*found.cycle, found.cycle[0])))
        yield ""
        yield f"each waits for the next: {circle}"


def _together(waits: Sequence[Waiting]) -> Iterator[list[Waiting]]:
    found: dict[object, list[Waiting]] = {}
    for one in waits:
        found.setdefault((one.meets or one.rank, one.location, one.what), []).append(one)
    yield from found.values()


def _left_out(some: Sequence[Waiting]) -> Iterator[str]:
    for one in some:
        if one.left_out:
            more = f", and {len(one.left_out) - 1} more" * (len(one.left_out) > 1)
            yield f"  rank {one.rank} has left out before it: {one.left_out[0].text}{more}"


def _ranks(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def _state(rank: int, found: Hang) -> str:
    """Describes the place of a rank that others wait for."""
    one = found.ranks.get(rank)
    if one is None:
        return f"not there: rank {rank}, which left no dump"
    if one.has_died:
        return f"not there: rank {rank}, which has ended with {one.error}"
    if one.entry is None:
        return f"not there: rank {rank}, which is in no collective"
    return f"not there: rank {rank}, which is in {one.what} ({one.location})"


def document(found: Hang) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "world_size": found.lowered.world_size,
        "mesh": phrases.mesh(found.lowered.axes),
        "absent": [*found.absent],
        "cycle": [*found.cycle],
        "ranks": [
            {
                "rank": one.rank,
                "call": one.what or None,
                "plan": (one.planned.where or None) if one.planned else None,
                "line": (one.planned.line or None) if one.planned else None,
                "code": one.code or None,
                "awaits": [*one.awaited],
                "error": one.error or None,
                "left_out": [call.text for call in one.left_out],
            }
            for one in found.ranks.values()
        ],
    }
