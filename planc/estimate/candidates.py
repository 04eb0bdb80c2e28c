"""Compiles and estimates the choices of a search, each as the plan that it writes."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planc import compiler
from planc.codes import CODES
from planc.diagnostic import Sink
from planc.estimate.choice import LEANEST, Choice, Sizes, Space, divisors
from planc.estimate.derived_counts import DerivedCounts
from planc.estimate.from_plan import Batch, PlanWork
from planc.estimate.memory import usable
from planc.estimate.moments import GIB
from planc.estimate.profiles import Hardware, Stack
from planc.estimate.step import Estimate, estimate, peak
from planc.estimate.workload import Workload
from planc.model.facts import Facts
from planc.ops.base import AxisRole
from planc.plan import elaborate
from planc.plan.apply_adapters import adapted
from planc.source import Source
from planc.syntax import ast
from planc.syntax.formatter.layout import laid_out
from planc.syntax.parse import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice with its estimate.

    Args:
        mesh: every axis with its size.
        words: what it does besides the mesh.
        micro_batches: as few as fit, or what the user set.
        violated: the requirements that it does not meet.
        text: of the plan, with the requirements.
    """

    choice: Choice
    mesh: Sizes
    words: str
    micro_batches: int
    estimate: Estimate
    violated: frozenset[str] = frozenset()
    text: str = ""

    @property
    def seconds(self) -> float:
        return self.estimate.time.seconds

    @property
    def peak(self) -> float:
        """GiB that a rank holds at most."""
        return self.estimate.fullest.peak / GIB

    @property
    def axes(self) -> str:
        """The mesh without axes of one rank."""
        return " | ".join(f"{name} {size}" for name, size in self.mesh if size > 1) or "1 rank"

    @property
    def named(self) -> str:
        parts = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        return f"{self.axes}; {self.words}; {parts}"


@dataclass(slots=True)
class Excluded:
    """How many choices were left out for one reason, and one of them."""

    count: int = 0
    example: str = ""


@dataclass(slots=True)
class Candidates:
    """
    Args:
        space: of the choices.
        files: of the plan that they extend.
        batch: of the step; its micro-batches count if `micro_batches` says so.
        counts: what the model's layers compute and keep.
        violated: the requirements that a choice does not meet.
        tried: how many choices were estimated.
        extended: meshes that were tried beside the best ones.
        nearest: of those that do not fit and meet all requirements, the one that needs least.
    """

    space: Space
    files: tuple[ast.File, ...]
    facts: Facts
    batch: Batch
    hardware: Hardware
    stack: Stack
    optimizer: str
    counts: DerivedCounts
    violated: Callable[[Choice], frozenset[str]]
    micro_batches: int | None = None
    tried: int = 0
    excluded: dict[str, Excluded] = field(default_factory=dict)
    nearest: Candidate | None = None
    extended: set[Sizes] = field(default_factory=set)
    _legal: dict[Sizes, tuple[str, str] | None] = field(default_factory=dict)
    _works: dict[Choice, PlanWork | None] = field(default_factory=dict)
    _alike: dict[object, PlanWork] = field(default_factory=dict)
    _loads: dict[tuple[Choice, int], Workload | None] = field(default_factory=dict)

    def exclude(self, reason: str, example: str) -> None:
        self.excluded.setdefault(reason, Excluded(example=example)).count += 1

    def legal(self, sizes: Sizes) -> bool:
        """Whether a plan on such a mesh passes all checks and the mesh can split the batch."""
        choice = self.space.alike(self.space.probe(sizes, LEANEST))
        if choice.sizes not in self._legal:
            sink = Sink()
            self.compiled(self.text(choice), sink)
            self._legal[choice.sizes] = _first_error(sink)
        if found := self._legal[choice.sizes]:
            self.exclude(*found)
            return False
        axes = self.space.mesh(sizes).axes
        rows, tokens = self.batch.global_batch, self.batch.sequence
        for role, size, what in (
            (AxisRole.DATA, rows, f"{rows} rows"),
            (AxisRole.SEQUENCE, tokens, f"{tokens} tokens"),
        ):
            ranks = 1
            for axis in axes:
                ranks *= axis.size if axis.role is role else 1
            if size % ranks:
                self.exclude("the mesh cannot split the batch", f"{what} among {ranks} ranks")
                return False
        return True

    def compiled(self, text: str, sink: Sink) -> compiler.Compiled:
        """A plan that extends the base, with all checks."""
        own = parse(Source("suggested.plan", text), sink)
        size = self.space.world_size
        return compiler.compile((*self.files, own), self.facts, sink, world_size=size)

    def text(self, choice: Choice) -> str:
        """Of the plan, without the requirements."""
        return replace(self.space, requires=()).text(choice)

    def candidate(self, choice: Choice) -> Candidate | None:
        """The choice with as few micro-batches as fit; None where none do."""
        work = self._work(choice)
        if work is None:
            return None
        self.tried += 1
        counts = self._divisions(work)
        if not counts:
            self.exclude(
                "the rows of a rank are no multiple of the micro-batches", self.space.words(choice)
            )
            return None

        def fitting(at: int) -> bool:
            load = self._load(choice, work, counts[at])
            return load is not None and peak(load, self.hardware, self.stack) <= self._usable

        # gradients wait between micro-batches, so that one may fit where two do not
        last = len(counts) - 1
        at = 0 if fitting(0) else len(counts)
        if at and last and fitting(last):
            at = bisect_left(range(last), True, lo=1, key=fitting)
        chosen = min(at, last)
        load = self._load(choice, work, counts[chosen])
        if load is None:
            return None

        def made() -> Candidate:
            return Candidate(
                choice=choice,
                mesh=tuple((a.name, a.size) for a in self.space.mesh(choice.sizes).axes),
                words=self.space.words(choice),
                micro_batches=counts[chosen],
                estimate=estimate(load, self.hardware, self.stack),
                violated=self.violated(choice),
            )

        if at < len(counts):
            return made()
        if not self.violated(choice):
            self._too_large(peak(load, self.hardware, self.stack), made)
        return None

    def _divisions(self, work: PlanWork) -> tuple[int, ...]:
        """The micro-batches that a rank's rows can be divided into, the fewest first."""
        parts = work.pipeline.microbatches if work.pipeline else 1
        rows, over = divmod(self.batch.global_batch // work.data_ranks, parts)
        counts = () if over else divisors(rows)
        return tuple(n for n in counts if n == (self.micro_batches or n))

    @property
    def _usable(self) -> float:
        return usable(self.hardware, self.stack)

    def verified(self, found: Candidate) -> Candidate | None:
        """The candidate as its plan is estimated, if that compiles without errors and fits."""
        sink = Sink()
        compiled = self.compiled(self.text(found.choice), sink)
        if compiled.lowered is None or compiled.applied is None:
            self.exclude(*(_first_error(sink) or ("it does not compile", found.named)))
            return None
        batch = replace(self.batch, micro_batches=found.micro_batches)
        work = PlanWork(*compiled.applied, batch, self.stack, self.optimizer)
        load = work.workload(self.counts.counted(work))
        exact = replace(found, estimate=estimate(load, self.hardware, self.stack))
        if exact.estimate.fits:
            return replace(exact, text=laid_out(self.space.text(found.choice)))
        if not exact.violated:
            self._too_large(exact.estimate.fullest.peak, lambda: exact)
        return None

    def _too_large(self, size: float, made: Callable[[], Candidate]) -> None:
        """Notes a candidate that needs `size` bytes; it is made only where something names it."""
        reason = f"needs more than the usable {self._usable / GIB:.1f} GiB"
        nearer = self.nearest is None or size / GIB < self.nearest.peak
        found = made() if nearer or reason not in self.excluded else None
        if nearer:
            self.nearest = found
        self.exclude(reason, f"{found.named}: {found.peak:.1f} GiB" if found else "")

    def _work(self, choice: Choice) -> PlanWork | None:
        """The work of the choice's plan; None where it cannot be elaborated."""
        key = self.space.alike(choice)
        if key not in self._works:
            sink = Sink()
            own = parse(Source("suggested.plan", self.text(key)), sink)
            files, size = (*self.files, own), self.space.world_size
            plan = elaborate(files, self.facts, sink, world_size=size)
            if error := _first_error(sink):
                self.exclude(*error)
            self._works[key] = (
                PlanWork(
                    *adapted(plan, self.facts), self.batch, self.stack, self.optimizer, self._alike
                )
                if plan and not error
                else None
            )
        return self._works[key]

    def _load(self, choice: Choice, work: PlanWork, micro_batches: int) -> Workload | None:
        """The step's work on the choice's mesh; None where its layers cannot be counted."""
        key = self.space.alike(choice), micro_batches
        mine = copy.copy(work)
        if key not in self._loads:
            mine.batch = replace(self.batch, micro_batches=micro_batches)
            counted = self.counts.derived(mine)
            self._loads[key] = mine.workload(counted) if counted else None
        load = self._loads[key]
        if load is None:
            return None
        mine.plan = replace(work.plan, mesh=self.space.mesh(choice.sizes))
        return replace(load, **mine.groups(), world=self.space.world_size)


def _first_error(sink: Sink) -> tuple[str, str] | None:
    """The title of the first error's code, and its message."""
    for found in sink:
        if found.severity == "error":
            return f"{found.code}: {CODES[found.code].title}", found.message
    return None
