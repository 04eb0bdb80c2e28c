"""Whether what the ranks of a plan call fits together: their steps, simulated side by side.

A collective ends when every rank of its group has come to it, as its n-th on that group, and the
ranks wait for it: a library may let them go on, but they need its result before long, so what does
not end here can hang there. A message begins where it is called and the rank goes on; it waits
where the code waits for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from planc.lowering.rank_calls import WAIT, RankCall
from planc.ops.claims import MESSAGES

Sequences = Mapping[int, Sequence[RankCall]]
"""Calls by rank."""


class Network(StrEnum):
    """The way in which a library carries messages.

    gloo carries all at once, those between two ranks in order. NCCL runs what one communicator has
    to do one after another: a batch is on that of its group, a message alone on one of its two
    ranks, unless the process group was made with a `device_id`: then it is on its group's too.
    """

    GLOO = "gloo"
    NCCL = "NCCL"
    ONE_COMMUNICATOR = "NCCL with device_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Different:
    """Two calls that meet and are not of one collective.

    Args:
        first, other: the calls.
        why: what differs, such as `all_reduce and all_gather`.
    """

    first: RankCall
    other: RankCall
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Ranks that wait forever.

    Args:
        network: that carries their messages.
        waits: by rank, the call that it waits in, and the ranks that it waits for.
        cycle: ranks each of which waits for the next; empty where they wait for one that has ended.
    """

    network: Network
    waits: Mapping[int, tuple[RankCall, tuple[int, ...]]]
    cycle: tuple[int, ...]


def difference(first: RankCall, other: RankCall) -> str:
    """The property that two calls of one collective must share and do not; empty if they do."""
    for name in ("kind", "reduces", "dtype"):
        a, b = getattr(first, name), getattr(other, name)
        if a != b:
            return f"{a or 'none'} and {b or 'none'}".replace("_", "-")
    if not (first.uneven or other.uneven) and first.numel != other.numel:
        return f"{first.numel:,} and {other.numel:,} elements"
    if first.during != other.during and {first.during, other.during} & _AFTER:
        return " and ".join(call.during or "the loop" for call in (first, other))
    return "" if first.unit == other.unit else f"{first.unit or 'none'} and {other.unit or 'none'}"


_AFTER = {"clipping", "optimizer"}
"""The phases that all ranks run at one time: sums of a loss and of norms have one size."""
Unit = tuple[int, bool, int]
"""Messages of a rank that are started together."""


@dataclass(slots=True)
class _Simulation:
    ranks: Sequences
    network: Network
    at: dict[int, int] = field(init=False)
    different: dict[Hashable, Different] = field(init=False, default_factory=dict)
    arrived: dict[tuple[Hashable, int], RankCall] = field(init=False, default_factory=dict)
    ends: dict[tuple[Hashable, str], deque[RankCall]] = field(
        init=False, default_factory=lambda: defaultdict(deque)
    )
    queues: dict[tuple[int, Hashable], deque[Unit]] = field(
        init=False, default_factory=lambda: defaultdict(deque)
    )
    left: dict[Unit, int] = field(init=False, default_factory=lambda: defaultdict(int))
    met: set[tuple[int, int]] = field(init=False, default_factory=set)
    messages: dict[tuple[int, int], RankCall] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.at = dict.fromkeys(self.ranks, 0)
        for rank, calls in self.ranks.items():
            for call in calls:
                if call.kind in MESSAGES:
                    self.messages[rank, call.work] = call
                    self.left[_unit(call)] += 1

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while self._step(rank):
                    moved = True
            while self._meet():
                moved = True

    def _step(self, rank: int) -> bool:
        """Lets a rank make its next call; false where it waits, or has ended."""
        call = self._next(rank)
        if call is None or (call.kind == WAIT and (rank, call.work) not in self.met):
            return False
        if call.kind == WAIT:
            pass
        elif call.kind in MESSAGES:
            queue = self.queues[rank, self._communicator(call)]
            if _unit(call) not in queue:
                queue.append(_unit(call))
            self.ends[self._channel(call), call.kind].append(call)
        else:
            return self._together(rank, call)
        self.at[rank] += 1
        return True

    def _together(self, rank: int, call: RankCall) -> bool:
        """Lets the ranks of a collective go on, if all of them are there."""
        group = _group(call)
        self.arrived[group, rank] = call
        if not all((group, other) in self.arrived for other in call.ranks):
            return False
        calls = [self.arrived.pop((group, other)) for other in call.ranks]
        for other in calls[1:]:
            if why := difference(calls[0], other):
                self.different.setdefault(group, Different(first=calls[0], other=other, why=why))
        for member in calls:
            self.at[member.rank] += 1
        return True

    def _meet(self) -> bool:
        """Lets messages meet that may."""
        moved = False
        for channel in list(dict.fromkeys(channel for channel, _ in self.ends)):
            sent, taken = self.ends[channel, "send"], self.ends[channel, "recv"]
            while sent and taken and all(map(self._may, (sent[0], taken[0]))):
                send, receive = sent.popleft(), taken.popleft()
                moved = True
                if (why := _other_message(send, receive)) and channel not in self.different:
                    self.different[channel] = Different(first=send, other=receive, why=why)
                for call in (send, receive):
                    self._end(call)
        return moved

    def _may(self, call: RankCall) -> bool:
        """Whether a message is the next one of its communicator, where these go in order."""
        queue = self.queues[call.rank, self._communicator(call)]
        return self.network is Network.GLOO or queue[0] == _unit(call)

    def _end(self, call: RankCall) -> None:
        self.met.add((call.rank, call.work))
        unit = _unit(call)
        self.left[unit] -= 1
        if not self.left[unit]:
            self.queues[call.rank, self._communicator(call)].remove(unit)

    def _communicator(self, call: RankCall) -> Hashable:
        alone = self.network is Network.NCCL and not call.batch
        group = _group(call)
        return (group, frozenset((call.rank, call.peer))) if alone else group

    def _channel(self, call: RankCall) -> Hashable:
        """Messages of a rank to another: the n-th that is sent is the n-th that is taken."""
        ends = (call.rank, call.peer) if call.kind == "send" else (call.peer, call.rank)
        of = self._communicator(call) if self.network is not Network.GLOO else _group(call)
        return of, ends

    def stuck(self) -> Stuck | None:
        """The ranks that have not ended, or whose messages have not, and what each waits for."""
        waits: dict[int, tuple[RankCall, tuple[int, ...]]] = {}
        for rank in self.ranks:
            call = self._next(rank)
            if call is None or call.kind == WAIT:
                call = self._unmet(rank, call)
            if call is None:
                continue
            others = [call.peer] if call.peer >= 0 else call.ranks
            absent = (o for o in others if call.peer >= 0 or (_group(call), o) not in self.arrived)
            waits[rank] = call, tuple(absent)
        if not waits:
            return None
        graph = {rank: others for rank, (_, others) in waits.items()}
        return Stuck(network=self.network, waits=waits, cycle=cycle(graph))

    def _unmet(self, rank: int, wait: RankCall | None) -> RankCall | None:
        """The message that a rank waits for, or that it has left when it ended: the first of its
        queue, behind which others are.
        """
        awaited = wait and self.messages[rank, wait.work]
        if awaited and self.network is Network.GLOO:
            return awaited
        named = (rank, self._communicator(awaited)) if awaited else None
        heads = {q[0] for key, q in self.queues.items() if q and named in (None, key)}
        heads = {unit for unit in heads if unit[0] == rank}
        calls = (call for (r, _), call in self.messages.items() if r == rank)
        return next(
            (c for c in calls if _unit(c) in heads and (rank, c.work) not in self.met), None
        )

    def _next(self, rank: int) -> RankCall | None:
        return _call_at(self.ranks[rank], self.at[rank])


def _group(call: RankCall) -> Hashable:
    """The key that a call shares with those that it meets."""
    return call.group, call.ranks


def _unit(call: RankCall) -> Unit:
    return (call.rank, True, call.batch) if call.batch else (call.rank, False, call.work)


def _other_message(first: RankCall, other: RankCall) -> str:
    for name in ("dtype", "numel"):
        a, b = getattr(first, name), getattr(other, name)
        if a != b:
            return f"{a} and {b}" + " elements" * (name == "numel")
    return ""


def cycle(graph: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Ranks each of which waits for the next, and the last for the first."""
    done: set[int] = set()
    for start in graph:
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in path and rank not in done:
            path.append(rank)
            rank = next((other for other in graph[rank] if other in graph), None)
        if rank is not None and rank in path:
            return tuple(path[path.index(rank) :])
        done.update(path)
    return ()


def fits(
    ranks: Sequences, networks: Sequence[Network] = tuple(Network)
) -> Iterator[Different | Stuck]:
    """Yields mismatches: on each group the first calls that differ; else ranks that wait forever,
    on the first of the networks in which some do.
    """
    for network in networks:
        simulation = _Simulation(ranks, network)
        simulation.run()
        yield from simulation.different.values()
        stuck = simulation.stuck()
        if stuck:
            yield stuck
        if stuck or simulation.different:
            return


def first_divergences(
    ranks: Sequences, places: Mapping[int, int]
) -> Iterator[tuple[RankCall | None, RankCall | None]]:
    """Ranks with one pipeline coordinate run one program: where a rank first calls something else
    than most of its place, a call of one of these and its own; None where one has ended.
    """
    programs = {rank: tuple(map(_program, calls)) for rank, calls in ranks.items()}
    for place in dict.fromkeys(places.values()):
        members = [rank for rank in ranks if places[rank] == place]
        usual = Counter(programs[rank] for rank in members).most_common(1)[0][0]
        lead = next(rank for rank in members if programs[rank] == usual)
        for rank in members:
            if programs[rank] != usual:
                at = _first_difference(usual, programs[rank])
                yield _call_at(ranks[lead], at), _call_at(ranks[rank], at)


def _first_difference(first: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    pairs = enumerate(zip(first, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(other)))


def _call_at(calls: Sequence[RankCall], at: int) -> RankCall | None:
    return calls[at] if at < len(calls) else None


def _program(call: RankCall) -> Hashable:
    """The key of a call that is equal on all ranks that run the same code; in a ring, ranks may
    send in turn.
    """
    kind = "message" if call.kind in MESSAGES else call.kind
    return kind, call.axes, call.dtype, call.reduces, call.during, call.module, call.unit
