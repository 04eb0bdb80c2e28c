"""Searches a space for the fastest plans that fit.

First each mesh is tried with the plan's own options, with the leanest and with the fastest; then
all ways to checkpoint and to compute the loss on the best meshes, of which the fastest are varied.
What is named in the end is compiled with all checks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import inf

from planc.ops.base import AxisRole
from planc.tools.estimate.memory import GIB
from planc.tools.suggest.candidates import Candidate, Candidates, Tally
from planc.tools.suggest.choice import FASTEST, LEANEST, Choice, Sizes

MESHES = 12
"""The number of meshes that are searched in full."""

ROUNDS, STARTS, NEAR = 2, 3, 1.2
"""The number of times that the extended axes are tried, the number of the best meshes on which they
are, and the slowdown against the best up to which a mesh is searched further."""

SLOWER = 2
"""After how many meshes in a row that are no faster no other size of an axis is tried."""

VARIED = 3
"""The number of the fastest choices on a mesh that are varied further."""

REFINED = 3
"""The number of the fastest plans that get stages of equal time, and, if it is asked for, a
budget."""

NAMED = 10
"""The number of plans that are named in the end."""

EQUAL, ROOM = 0.01, 0.95
"""The relative difference of times that an estimate cannot tell apart, and the share of usable
memory up to which a plan has slack: of equal plans the fastest with slack is better, and without
one the leanest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search.

    Args:
        best: the fastest plans that fit and compile, in order.
        tally: of all choices.
        costs: for each requirement, the fastest plan that violates it alone; None for none.
        apart: the fastest plan whose mesh differs by more than replicas.
    """

    best: tuple[Candidate, ...]
    tally: Tally
    costs: dict[str, Candidate | None]
    apart: Candidate | None


def search(
    candidates: Candidates, progress: Callable[[int, int], None], *, budgets: bool = False
) -> Found:
    """The fastest plans.

    Args:
        budgets: whether the first ones also get a budget for what their layers keep.
        progress: is told how many of how many parts are done.
    """
    space = candidates.space
    meshes = list(space.meshes())
    total = len(meshes) + MESHES
    ranked = _search_meshes(candidates, meshes, _probe, lambda done: progress(done, total))
    for _ in range(ROUNDS):
        ranked |= _extend(candidates, ranked)
    best_meshes = _best_meshes(ranked.values())
    ranked |= _search_meshes(
        candidates, best_meshes, _in_full, lambda done: progress(len(meshes) + done, total)
    )
    order = sorted(ranked.values(), key=lambda c: (c.seconds, len(space.text(c.choice))))
    best = by_slack(islice(_select_named(candidates, order), NAMED))
    for refined in (candidates.balance_stages, *((candidates.with_budget,) if budgets else ())):
        more = filter(None, map(refined, best[:REFINED]))
        best = by_slack((*best, *more))[:NAMED]
    costs = {
        condition: next(_select_named(candidates, order, frozenset({condition})), None)
        for condition in space.requires
    }
    progress(total, total)
    return Found(
        best=tuple(best),
        tally=candidates.tally,
        costs=costs,
        apart=_alternative(candidates, best[0], order) if best else None,
    )


def search_one_mesh(candidates: Candidates) -> tuple[Candidate | None, Candidate | None]:
    """The fastest plan of a space with one mesh, and without one the plan that needs the least
    memory.
    """
    ranked: dict[Choice, Candidate] = {}
    for sizes in candidates.space.meshes():
        if candidates.legal(sizes):
            ranked |= _in_full(candidates, sizes)
    order = sorted(ranked.values(), key=lambda c: c.seconds)
    best = next(_select_named(candidates, order), None)
    return best, None if best else candidates.tally.nearest


def by_slack(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates by time; of those whose times cannot be told apart the ones with slack first."""
    left, order = sorted(candidates, key=lambda c: c.seconds), list[Candidate]()
    while left:
        equal = [c for c in left if c.seconds <= left[0].seconds * (1 + EQUAL)]
        slack = (c for c in equal if c.peak * GIB <= ROOM * c.estimate.usable)
        order.append(next(slack, None) or min(equal, key=lambda c: c.peak))
        left.remove(order[-1])
    return order


def _search_meshes(
    candidates: Candidates,
    meshes: Sequence[Sizes],
    find: Callable[[Candidates, Sizes], dict[Choice, Candidate]],
    progress: Callable[[int], None],
) -> dict[Choice, Candidate]:
    """Calls a search on each mesh, and returns its candidates.

    Meshes that differ by replicas alone come together, as most of what they compute is the same.

    Args:
        progress: is told the number of meshes that are done.
    """
    candidates_by_choice: dict[Choice, Candidate] = {}
    for done, sizes in enumerate(meshes):
        progress(done)
        candidates_by_choice |= find(candidates, sizes)
    return candidates_by_choice


def _probe(candidates: Candidates, sizes: Sizes) -> dict[Choice, Candidate]:
    """The probes of a mesh with one rank along the extended axes."""
    if not candidates.legal(sizes):
        return {}
    probes = (candidates.space.probe(sizes, options) for options in ({}, LEANEST, FASTEST))
    return _try(candidates, probes) or _probe_divisions(candidates, sizes)


def _in_full(candidates: Candidates, sizes: Sizes) -> dict[Choice, Candidate]:
    """All ways to checkpoint and to compute the loss, and the fastest of them varied."""
    here = _try(candidates, candidates.space.choices(sizes))
    first = sorted(here.values(), key=lambda c: c.seconds)[:VARIED]
    varied = (other for c in first for other in candidates.space.variations(c.choice))
    return here | _try(candidates, varied)


def _probe_divisions(candidates: Candidates, sizes: Sizes) -> dict[Choice, Candidate]:
    """The probes of a mesh that holds no whole experts, divided among the best number of ranks:
    fewer all-gather more, and more send tokens farther, so that times fall and then rise.
    """
    space = candidates.space
    lean = [space.probe(other, LEANEST) for other in space.expert_divisions(sizes)]

    @cache
    def seconds(at: int) -> float:
        candidate = candidates.candidate(lean[at])
        return candidate.seconds if candidate else inf

    def rises(at: int) -> bool:
        return seconds(at) < inf and seconds(at) <= seconds(at + 1)

    at = bisect_left(range(len(lean) - 1), True, key=rises)
    if not lean or seconds(at) == inf or not candidates.legal(lean[at].sizes):
        return {}
    return _try(candidates, (lean[at], space.probe(lean[at].sizes, FASTEST)))


def _extend(candidates: Candidates, ranked: dict[Choice, Candidate]) -> dict[Choice, Candidate]:
    """The probes of meshes beside the best ones, which have other sizes of one extended axis, and
    beside those that have too many data ranks for the batch.
    """
    space, nearest = candidates.space, candidates.tally.nearest
    starts = _best_meshes(ranked.values())[:STARTS]
    if not starts and nearest:
        starts = [nearest.choice.sizes]
    starts += _too_wide(candidates)[:STARTS]
    known = {choice.sizes for choice in ranked} | candidates.extended
    near = NEAR * min((c.seconds for c in ranked.values()), default=inf)
    extended: dict[Choice, Candidate] = {}
    for start in starts:
        here = (c.seconds for c in ranked.values() if c.choice.sizes == start)
        seconds = min(here, default=inf)
        for beside in space.neighbors(start):
            extended |= _along(candidates, beside, known, seconds, near)
        # times rise where ranks begin to divide experts, then fall and rise again
        extended |= _along(candidates, space.expert_divisions(start), known, inf, near)
    return extended


def _too_wide(candidates: Candidates) -> list[Sizes]:
    """The meshes that cannot split the batch, those with the fewest data ranks first; of those that
    differ by replicas alone the first.
    """
    space = candidates.space
    different = {space.alike(space.probe(s, {})).sizes: s for s in reversed(candidates.too_wide)}
    return sorted(different.values(), key=lambda s: space.mesh(s).ranks_of(AxisRole.DATA))


def _along(
    candidates: Candidates, beside: Sequence[Sizes], known: set[Sizes], seconds: float, near: float
) -> dict[Choice, Candidate]:
    """The probes of the meshes that are not `known` and are faster than `near`. They end behind one
    that is slower than that, and behind two in a row that do not fit or are no faster than the
    fastest so far: what an axis sends or repeats grows with its ranks.

    Args:
        seconds: of the mesh that they are beside; infinite where all are tried.
    """
    space, slower, fastest = candidates.space, 0, seconds
    ranked_along: dict[Choice, Candidate] = {}
    for sizes in beside:
        if sizes in known:
            continue
        known.add(sizes)
        candidates.extended.add(sizes)
        if candidates.unsplit(sizes):
            continue
        probes = [space.probe(sizes, options) for options in (LEANEST, FASTEST)]
        least = {c: s for c in probes if (s := candidates.least(c)) is not None}
        here = _try(candidates, (c for c in probes if least.get(c, inf) < near or near == inf))
        fast = min((c.seconds for c in here.values()), default=inf)
        if fast < near and candidates.legal(sizes):
            ranked_along |= here
        if least:
            far = near <= min(fast, *least.values()) < inf
            slower = 0 if fast < fastest else SLOWER if far else slower + 1
            fastest = min(fast, fastest)
        if slower >= SLOWER and seconds < inf:
            candidates.extended.update(beside)
            break
    return ranked_along


def _alternative(
    candidates: Candidates, best: Candidate, order: list[Candidate]
) -> Candidate | None:
    def mesh(candidate: Candidate) -> Sizes:
        return candidates.space.alike(candidate.choice).sizes

    others = [c for c in order if mesh(c) != mesh(best)]
    return next(_select_named(candidates, others), None)


def _try(candidates: Candidates, choices: Iterable[Choice]) -> dict[Choice, Candidate]:
    tried = (candidates.candidate(choice) for choice in dict.fromkeys(choices))
    return {c.choice: c for c in tried if c}


def _best_meshes(ranked: Iterable[Candidate]) -> list[Sizes]:
    """The meshes of the fastest candidates that meet all requirements, then of the fastest."""
    order = sorted(ranked, key=lambda c: c.seconds)
    meeting = dict.fromkeys(c.choice.sizes for c in order if not c.violated)
    meshes = dict.fromkeys(c.choice.sizes for c in order)
    return list(dict.fromkeys((*islice(meeting, MESHES), *islice(meshes, MESHES))))


def _select_named(
    candidates: Candidates, order: list[Candidate], violated: frozenset[str] = frozenset()
) -> Iterator[Candidate]:
    """The fastest that violate just these requirements, of those that differ by replicas alone the
    first, and of equal ones the shortest plan.
    """
    seen: set[object] = set()
    for candidate in order:
        keys = candidates.space.alike(candidate.choice), (candidate.seconds, candidate.peak)
        if candidate.violated != violated or not seen.isdisjoint(keys):
            continue
        if verified := candidates.verify(candidate):
            seen.update(keys)
            yield verified
