"""Compiles and estimates the choices of a search, each as the plan that it writes."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from planc import compiler
from planc.checks.queries import divisors
from planc.compiler import complete_plan
from planc.diagnostics.codes import CODES
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.infer.apply_adapters import adapt_plan
from planc.ir.nodes import Mesh
from planc.lowering.step import Step
from planc.model.facts import Facts
from planc.ops.base import AxisRole
from planc.syntax import ast
from planc.syntax.formatter.layout import laid_out
from planc.syntax.parse import parse
from planc.tools.estimate.counted import Count
from planc.tools.estimate.from_plan import Batch, PlanWork
from planc.tools.estimate.memory import GIB, usable
from planc.tools.estimate.profiles import Hardware, Stack
from planc.tools.estimate.stages import with_timed_stages
from planc.tools.estimate.step import Estimate, estimate, peak
from planc.tools.estimate.workload import Workload
from planc.tools.suggest.choice import LEANEST, Choice, Sizes, Space

UNSPLIT = "the mesh cannot split the batch"
UNEVEN = "the rows of a rank are no multiple of the micro-batches"
WAYS_OUT = {
    UNSPLIT: "use a batch that more meshes can split, such as one row for each rank",
    UNEVEN: "use another number of micro-batches, or leave them to the search",
}
"""Advice for reasons that leave out most choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice with its estimate.

    Args:
        mesh: every axis with its size.
        words: what it does besides the mesh.
        micro_batches: as few as fit, or what the user set.
        violated: the requirements that it does not meet.
        text: of the plan, with the requirements.
        counted: bytes that a rank of it held at most when it was run; None where none was.
    """

    choice: Choice
    mesh: Sizes
    words: str
    micro_batches: int
    estimate: Estimate
    violated: frozenset[str] = frozenset()
    text: str = ""
    counted: float | None = None

    @property
    def axes(self) -> str:
        """The mesh without axes of one rank."""
        return _axes(self.mesh)

    @property
    def label(self) -> str:
        return _label(self.mesh, self.words, self.micro_batches)

    @property
    def seconds(self) -> float:
        return self.estimate.time.seconds

    @property
    def peak(self) -> float:
        """GiB that a rank holds at most."""
        return self.estimate.fullest.peak / GIB


STEPS, LEAST = 32, 4
"""A budget has so many parts of the bytes that layers would keep, of 32; inputs take one or two."""

_Load = tuple[Workload, float] | None
"""The work of a step and the bytes that it needs; None where its layers cannot be counted."""


@dataclass(slots=True)
class Excluded:
    """The number of choices that were left out for one reason, and one of them."""

    count: int = 0
    example: str = ""


@dataclass(slots=True)
class Tally:
    """The results of the choices of a space that were tried.

    Args:
        tried: how many choices were estimated.
        nearest: of those that do not fit and meet all requirements, the one that needs least.
    """

    tried: int = 0
    excluded: dict[str, Excluded] = field(default_factory=dict)
    nearest: Candidate | None = None

    def exclude(self, reason: str, example: str, count: int = 1) -> None:
        self.excluded.setdefault(reason, Excluded(example=example)).count += count


@dataclass(slots=True)
class Candidates:
    """
    Args:
        space: of the choices.
        files: of the plan that they extend.
        batch: of the step; its micro-batches count if `micro_batches` says so.
        count: what the model's layers compute and keep.
        violated: the requirements that a choice does not meet.
        tally: of the choices that were tried.
        extended: meshes that were tried beside the best ones.
        too_wide: meshes with more data ranks than rows, or with a number that does not divide them.
    """

    space: Space
    files: tuple[ast.File, ...]
    facts: Facts
    batch: Batch
    hardware: Hardware
    stack: Stack
    optimizer: str
    count: Count
    violated: Callable[[Choice], frozenset[str]]
    micro_batches: int | None = None
    tally: Tally = field(default_factory=Tally)
    extended: set[Sizes] = field(default_factory=set)
    too_wide: list[Sizes] = field(default_factory=list)
    _parsed: dict[str, ast.File] = field(default_factory=dict)
    _legal: dict[Sizes, tuple[tuple[str, str] | None, int]] = field(default_factory=dict)
    _works: dict[Choice, PlanWork | None] = field(default_factory=dict)
    _alike: dict[object, PlanWork] = field(default_factory=dict)
    _loads: dict[tuple[Choice, int], Workload | None] = field(default_factory=dict)

    def of_space(self, space: Space) -> Candidates:
        """The candidates of another space of the same step, of which none was tried."""
        return Candidates(
            space=space,
            files=self.files,
            facts=self.facts,
            batch=self.batch,
            hardware=self.hardware,
            stack=self.stack,
            optimizer=self.optimizer,
            count=self.count,
            violated=self.violated,
            micro_batches=self.micro_batches,
            _parsed=self._parsed,
        )

    def legal(self, sizes: Sizes) -> bool:
        """Whether a plan on such a mesh passes all checks and the mesh can split the batch."""
        choice = self.space.alike(self.space.probe(sizes, LEANEST))
        if choice.sizes not in self._legal:
            sink = Sink()
            lowered = self.compile(choice, sink).lowered
            runs = Step(lowered=lowered).runs if lowered else 1
            self._legal[choice.sizes] = _first_error(sink), runs
        reason, runs = self._legal[choice.sizes]
        if reason:
            self.tally.exclude(*reason)
            return False
        if role := self.unsplit(sizes, runs):
            self.too_wide += [sizes] if role is AxisRole.DATA else []
        return role is None

    def unsplit(self, sizes: Sizes, runs: int = 1) -> AxisRole | None:
        """The role of the axes whose ranks cannot split the batch, with so many runs of tokens in
        a rank's part of a sequence.
        """
        mesh = self.space.mesh(sizes)
        rows, tokens = self.batch.global_batch, self.batch.sequence
        for role, size, what, each in (
            (AxisRole.DATA, rows, f"{rows} rows", 1),
            (AxisRole.SEQUENCE, tokens, f"{tokens} tokens", runs),
        ):
            ranks = mesh.ranks_of(role)
            if size % (ranks * each):
                more = f", {each} runs each" if each > 1 else ""
                self.tally.exclude(UNSPLIT, f"{what} among {ranks} ranks{more}")
                return role
        return None

    def compile(self, choice: Choice, sink: Sink) -> compiler.Compiled:
        """The choice's plan, without the requirements, with all checks."""
        size = self.space.world_size
        return compiler.compile(self._files(choice, sink), self.facts, sink, world_size=size)

    def _files(self, choice: Choice, sink: Sink) -> tuple[ast.File, ...]:
        """The base, and what the choice's plan adds to it, each part parsed once."""
        added = []
        for part in replace(self.space, requires=()).parts(choice):
            file = self._parsed.get(part) or parse(Source("suggested.plan", part), sink)
            if not sink.errors:
                self._parsed[part] = file
            added.append(file)
        return (*self.files, *added)

    def candidate(self, choice: Choice) -> Candidate | None:
        """The choice with as few micro-batches as fit; None where none do."""
        work = self._work(choice)
        if work is None:
            return None
        self.tally.tried += 1
        counts = self._divisions(work)
        if not counts:
            self.tally.exclude(UNEVEN, self.space.words(choice))
            return None

        mesh = self.space.mesh(choice.sizes)
        load = self._loading(choice, mesh, work, counts)
        at, fits = self._fewest(load, len(counts))
        loaded, violated = load(at), self.violated(choice)
        if loaded is None or not (fits or not violated):
            return None
        sizes, words = tuple((a.name, a.size) for a in mesh.axes), self.space.words(choice)
        if not fits and not self._too_large(loaded[1], _label(sizes, words, counts[at])):
            return None
        candidate = Candidate(
            choice=choice,
            mesh=sizes,
            words=words,
            micro_batches=counts[at],
            estimate=estimate(loaded[0], self.hardware, self.stack),
            violated=violated,
        )
        if fits:
            return candidate
        self.tally.nearest = candidate
        return None

    def least(self, choice: Choice) -> float | None:
        """Seconds of a step with as few micro-batches as there can be, whether they fit or not: no
        other number is faster. Infinite where one row at a time would not fit either, which needs
        more than half its share of what all rows need. None where the choice has no estimate.
        """
        work = self._work(choice)
        counts = self._divisions(work) if work else ()
        if work is None or not counts:
            return None
        loaded = self._loading(choice, self.space.mesh(choice.sizes), work, counts)(0)
        if loaded is None:
            return None
        if loaded[1] > 2 * self._usable * counts[-1] / counts[0]:
            return inf
        return estimate(loaded[0], self.hardware, self.stack).time.seconds

    def _loading(
        self, choice: Choice, mesh: Mesh, work: PlanWork, counts: tuple[int, ...]
    ) -> Callable[[int], _Load]:
        """Returns a function from the number of micro-batches to the work of a step, and its
        memory.
        """
        here = copy.copy(work)
        here.plan = replace(work.plan, mesh=mesh)
        groups = here.groups()

        @cache
        def load(at: int) -> _Load:
            workload = self._load(choice, work, counts[at])
            if workload is None:
                return None
            whole = replace(workload, **groups, world=self.space.world_size)
            return whole, peak(whole, self.stack)

        return load

    def _fewest(self, load: Callable[[int], _Load], count: int) -> tuple[int, bool]:
        """The first number of micro-batches that fits, else the last one; and whether it fits."""

        def fitting(at: int) -> bool:
            loaded = load(at)
            return loaded is not None and loaded[1] <= self._usable

        # gradients wait between micro-batches, so that one may fit where two do not
        last = count - 1
        at = 0 if fitting(0) else count
        if at and last and fitting(last):
            at = bisect_left(range(last), True, lo=1, key=fitting)
        return min(at, last), at < count

    def _divisions(self, work: PlanWork) -> tuple[int, ...]:
        """The micro-batches that a rank's rows can be divided into, the fewest first."""
        parts = work.pipeline.microbatches if work.pipeline else 1
        data = work.plan.mesh.ranks_of(AxisRole.DATA)
        rows, over = divmod(self.batch.global_batch // data, parts)
        counts = () if over else divisors(rows)
        return tuple(n for n in counts if n == (self.micro_batches or n))

    @property
    def _usable(self) -> float:
        return usable(self.hardware, self.stack)

    def balance_stages(self, candidate: Candidate) -> Candidate | None:
        """The candidate with stages that take as much time each; None where it has no stages, or
        is no slower.
        """
        rows = self._rows(candidate)
        choice = rows and self.space.balance_stages(candidate.choice, rows)
        other = self._change(candidate, choice) if choice else None
        return other if other and other.seconds < candidate.seconds else None

    def with_budget(self, candidate: Candidate) -> Candidate | None:
        """The candidate with the largest budget that fits, in place of its way to checkpoint; None
        where it has none, or is no slower.
        """
        rows = self._rows(candidate)
        if not rows or not self.space.checkpoints(candidate.choice):
            return None

        def with_step(step: int) -> Candidate | None:
            budget = (step / STEPS, rows, self.batch.sequence)
            return self._change(candidate, replace(candidate.choice, save="", budget=budget))

        low, high = LEAST, STEPS
        best = with_step(low)
        while best and high - low > 1:
            middle = (low + high) // 2
            if more := with_step(middle):
                best, low = more, middle
            else:
                high = middle
        return best if best and best.seconds < candidate.seconds else None

    def _rows(self, candidate: Candidate) -> int:
        """The rows of a pass of a rank; 0 where its plan cannot be elaborated."""
        work = copy.copy(self._work(candidate.choice))
        if work is None:
            return 0
        work.batch = replace(self.batch, micro_batches=candidate.micro_batches)
        work.plan = replace(work.plan, mesh=self.space.mesh(candidate.choice.sizes))
        return work.rows

    def _change(self, candidate: Candidate, choice: Choice) -> Candidate | None:
        """The candidate with another choice on its mesh, as `verify`."""
        return self.verify(replace(candidate, choice=choice, words=self.space.words(choice)))

    def verify(self, candidate: Candidate) -> Candidate | None:
        """The candidate as its plan is estimated, if that compiles without errors and fits."""
        sink = Sink()
        compiled = self.compile(candidate.choice, sink)
        if compiled.lowered is None or compiled.applied is None:
            self.tally.exclude(*(_first_error(sink) or ("it does not compile", candidate.label)))
            return None
        batch = replace(self.batch, micro_batches=candidate.micro_batches)
        work = PlanWork(*compiled.applied, batch, self.stack, self.optimizer)
        load = work.workload(self.count(work.micro_batch))
        exact = replace(candidate, estimate=estimate(load, self.hardware, self.stack))
        if exact.estimate.fits:
            return replace(exact, text=laid_out(self.space.text(candidate.choice)))
        if not exact.violated and self._too_large(exact.estimate.fullest.peak, exact.label):
            self.tally.nearest = exact
        return None

    def _too_large(self, size: float, named: str) -> bool:
        """Records a choice that needs `size` bytes, which is too much.

        Returns:
            Whether it needs less than all choices that were recorded before.
        """
        reason = f"needs more than the usable {self._usable / GIB:.1f} GiB"
        self.tally.exclude(reason, f"{named}: {size / GIB:.1f} GiB")
        return self.tally.nearest is None or size / GIB < self.tally.nearest.peak

    def _work(self, choice: Choice) -> PlanWork | None:
        """The work of the choice's plan; None where it cannot be elaborated."""
        key = self.space.alike(choice)
        if key not in self._works:
            sink = Sink()
            size = self.space.world_size
            plan = complete_plan(self._files(key, sink), self.facts, sink, world_size=size)
            plan = plan and with_timed_stages(plan, self.facts, sink)
            if error := _first_error(sink):
                self.tally.exclude(*error)
            self._works[key] = (
                PlanWork(
                    *adapt_plan(plan, self.facts),
                    self.batch,
                    self.stack,
                    self.optimizer,
                    self._alike,
                )
                if plan and not error
                else None
            )
        return self._works[key]

    def _load(self, choice: Choice, work: PlanWork, micro_batches: int) -> Workload | None:
        """The step's work on a mesh without replicas; None where layers cannot be counted."""
        key = self.space.alike(choice), micro_batches
        if key not in self._loads:
            mine = copy.copy(work)
            mine.batch = replace(self.batch, micro_batches=micro_batches)
            counted = self.count(mine.micro_batch)
            self._loads[key] = mine.workload(counted) if counted else None
        return self._loads[key]


def _axes(mesh: Sizes) -> str:
    return " | ".join(f"{name} {size}" for name, size in mesh if size > 1) or "1 rank"


def _label(mesh: Sizes, words: str, micro_batches: int) -> str:
    return f"{_axes(mesh)}; {words}; {micro_batches} micro-batch{'es' * (micro_batches > 1)}"


def _first_error(sink: Sink) -> tuple[str, str] | None:
    """The title of the first error's code, and its message."""
    for finding in sink:
        if finding.severity == "error":
            return f"{finding.code}: {CODES[finding.code].title}", finding.message
    return None
