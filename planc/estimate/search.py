"""Searches a space for the fastest plans that fit.

First each mesh is tried with the plan's own options, with the leanest and with the fastest; then
all ways to checkpoint and to compute the loss on the best meshes, of which the fastest are varied.
What is named in the end is compiled with all checks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import inf

from planc.estimate.candidates import Candidate, Candidates, Excluded
from planc.estimate.choice import FASTEST, LEANEST, Choice, Sizes

MESHES = 12
"""How many meshes are searched in full."""

ROUNDS, STARTS, NEAR = 2, 3, 1.2
"""How often the extended axes are tried, on how many of the best meshes, and how much slower than
the best a mesh may be to be searched further."""

VARIED = 3
"""How many of the fastest choices on a mesh are varied further."""

NAMED = 10
"""How many plans are named in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search.

    Args:
        best: the fastest plans that fit and compile, in order.
        tried: the number of choices that were estimated.
        excluded: by reason.
        costs: for each requirement, the fastest plan that violates it alone; None for none.
        apart: the fastest plan whose mesh differs by more than replicas.
        nearest: the choice that needs the least memory, where none fits.
    """

    best: tuple[Candidate, ...]
    tried: int
    excluded: dict[str, Excluded]
    costs: dict[str, Candidate | None]
    apart: Candidate | None
    nearest: Candidate | None


def search(
    candidates: Candidates, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Found:
    """The fastest plans.

    Args:
        progress: is told how many of how many parts are done.
    """
    space = candidates.space
    meshes = list(space.meshes())
    total = len(meshes) + MESHES
    ranked: dict[Choice, Candidate] = {}
    for done, sizes in enumerate(meshes):
        progress(done, total)
        if candidates.legal(sizes):
            probes = (space.probe(sizes, options) for options in ({}, LEANEST, FASTEST))
            here = _tried(candidates, probes)
            ranked |= here or _divided(candidates, sizes)
    for _ in range(ROUNDS):
        ranked |= _extended(candidates, ranked)
    for done, sizes in enumerate(_best_meshes(ranked.values(), space.requires)):
        progress(len(meshes) + done, total)
        here = _tried(candidates, space.choices(sizes))
        first = sorted(here.values(), key=lambda c: c.seconds)[:VARIED]
        varied = (other for c in first for other in space.variations(c.choice))
        ranked |= here | _tried(candidates, varied)
    order = sorted(ranked.values(), key=lambda c: (c.seconds, len(candidates.text(c.choice))))
    best = sorted(islice(_named(candidates, order), NAMED), key=lambda c: c.seconds)
    costs = {
        condition: next(_named(candidates, order, frozenset({condition})), None)
        for condition in space.requires
    }
    progress(total, total)
    return Found(
        best=tuple(best),
        tried=candidates.tried,
        excluded=candidates.excluded,
        costs=costs,
        apart=_apart(candidates, best[0], order) if best else None,
        nearest=candidates.nearest,
    )


def _divided(candidates: Candidates, sizes: Sizes) -> dict[Choice, Candidate]:
    """The probes of a mesh that holds no whole experts, divided among the best number of ranks:
    fewer all-gather more, and more send tokens farther, so that times fall and then rise.
    """
    space = candidates.space
    lean = [space.probe(other, LEANEST) for other in space.divided(sizes)]

    @cache
    def seconds(at: int) -> float:
        found = candidates.candidate(lean[at])
        return found.seconds if found else inf

    def rises(at: int) -> bool:
        return seconds(at) < inf and seconds(at) <= seconds(at + 1)

    at = bisect_left(range(len(lean) - 1), True, key=rises)
    if not lean or seconds(at) == inf or not candidates.legal(lean[at].sizes):
        return {}
    return _tried(candidates, (lean[at], space.probe(lean[at].sizes, FASTEST)))


def _extended(candidates: Candidates, ranked: dict[Choice, Candidate]) -> dict[Choice, Candidate]:
    """The probes of meshes beside the best ones, which have other sizes of one extended axis."""
    space, found = candidates.space, dict[Choice, Candidate]()
    starts = _best_meshes(ranked.values(), space.requires)[:STARTS]
    if not starts and candidates.nearest:
        starts = [candidates.nearest.choice.sizes]
    known = {choice.sizes for choice in ranked} | candidates.extended
    for sizes in dict.fromkeys(n for start in starts for n in space.neighbors(start)):
        if sizes in known:
            continue
        candidates.extended.add(sizes)
        probes = (space.probe(sizes, options) for options in (LEANEST, FASTEST))
        here = _tried(candidates, probes)
        near = NEAR * min((c.seconds for c in ranked.values()), default=inf)
        if min((c.seconds for c in here.values()), default=inf) < near and candidates.legal(sizes):
            found |= here
    return found


def _apart(candidates: Candidates, best: Candidate, order: list[Candidate]) -> Candidate | None:
    def mesh(candidate: Candidate) -> Sizes:
        return candidates.space.alike(candidate.choice).sizes

    others = [c for c in order if mesh(c) != mesh(best)]
    return next(_named(candidates, others), None)


def _tried(candidates: Candidates, choices: Iterable[Choice]) -> dict[Choice, Candidate]:
    found = (candidates.candidate(choice) for choice in dict.fromkeys(choices))
    return {c.choice: c for c in found if c}


def _best_meshes(ranked: Iterable[Candidate], requires: tuple[str, ...]) -> list[Sizes]:
    """The meshes of the fastest candidates; with requirements, as many again that meet them."""
    order = sorted(ranked, key=lambda c: c.seconds)
    meeting = [c.choice.sizes for c in order if not c.violated] if requires else []
    every = [c.choice.sizes for c in order]
    first = list(dict.fromkeys(meeting))[:MESHES]
    return list(dict.fromkeys([*first, *list(dict.fromkeys(every))[:MESHES]]))


def _named(
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
        if found := candidates.verified(candidate):
            seen.update(keys)
            yield found
