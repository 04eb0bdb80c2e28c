"""Compares the memory that one rank of a plan held in a run with the estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Span
from planc.ir.nodes import Plan, Unit
from planc.ir.optimizer_dtype import assume_fp32_steps
from planc.model.facts import Facts, Modules, generic
from planc.model.fused_kernels import run_on
from planc.ops import phrases
from planc.ops.base import AxisRole
from planc.simulate.rank_job import RankRunner, RankStep
from planc.tools.estimate.answer import (
    VERDICTS,
    Answer,
    Request,
    answer_for,
    assumptions,
    document,
    held_lines,
    unit_of,
)
from planc.tools.estimate.from_plan import Batch
from planc.tools.estimate.memory import GIB, Item, Moment, RankMemory
from planc.tools.estimate.step import Estimate
from planc.tools.measure.count import CountedRank, NotCountedError, count, shallower
from planc.tools.measure.images import describe
from planc.tools.suggest.candidates import Candidate, Candidates

_BY_UNITS = (
    *("parameters", "gradients", "optimizer state", "gathered parameters"),
    "copies in the optimizer",
)
"""The items of memory that the fsdp section decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRanks:
    """
    Args:
        answer: the estimate of the same step.
        counted: the same, with the bytes that each pipeline rank held.
        ranks: what was run.
        device: where; empty for fake tensors.
        images: of each row.
        image_size: height and width of an image; empty for the configuration's.
    """

    answer: Answer
    counted: Estimate
    ranks: tuple[CountedRank, ...]
    device: str = ""
    images: int = 0
    image_size: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of blocks of the models that were run."""
        return self.ranks[0].layers

    @property
    def microbatches(self) -> tuple[int, ...]:
        """The fewest numbers of microbatches of a pipeline that were run."""
        return min(rank.microbatches for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether the fullest of the ranks that were run fits on the device."""
        return self.counted.fits and not any(rank.missed for rank in self.ranks)

    @property
    def seconds(self) -> float:
        """Seconds of compute in a step, of the rank that takes longest; 0 without a device."""
        return max(sum(rank.seconds.values()) for rank in self.ranks)

    @property
    def estimate_is_off(self) -> bool:
        """Whether the estimate of a rank differs from what it held by more than `FAR`. Images are
        not estimated, and a device that had no more memory held less than the step needs.
        """
        return not self.images and any(
            abs(self.answer.estimate.ranks[rank.rank].peak / rank.peak - 1) > FAR
            for rank, run in zip(self.counted.ranks, self.ranks, strict=True)
            if not run.missed
        )

    def __str__(self) -> str:
        return "\n".join(text(self))


FAR = 0.1
"""The relative difference of an estimate and a run above which `planc measure` warns."""


def measure(
    compiled: Compiled,
    request: Request,
    sink: Sink,
    *,
    layers: int | None = None,
    device: str = "",
    images: int = 0,
    image_size: tuple[int, ...] = (),
    **options: Any,
) -> MeasuredRanks | None:
    """Runs ranks of a plan one at a time, and measures the memory that each holds.

    Args:
        request: the step, with a batch.
        layers: the number of layers of a smaller model to run; None for all.
        images: the number of images in each row.
        image_size: height and width of an image; empty for the configuration's.
        device, options: see `count`.

    Returns:
        None after an error, such as PL727 if a rank cannot run the step alone.
    """
    try:
        if layers is not None and not sink.has_errors:
            compiled = shallower(compiled, layers, sink, device)
        run = replace(request, kernels=run_on(device), layer_kernels="" if device else "eager")
        answer = answer_for(compiled, run, sink)
        if answer is None or sink.has_errors:
            return None
        assert request.batch
        step = _step(answer.plan, answer.facts, request, request.batch)
        step = replace(step, images=images, image_size=image_size)
        ranks = tuple(count(compiled, step, device=device, **options))
    except NotCountedError as error:
        error.report(sink)
        return None
    memories = tuple(_memory(rank, answer.plan) for rank in ranks)
    counted = replace(answer.estimate, ranks=memories)
    return MeasuredRanks(
        answer=answer,
        counted=counted,
        ranks=ranks,
        device=device,
        images=images,
        image_size=image_size,
    )


def _step(plan: Plan, facts: Facts, request: Request, batch: Batch) -> RankStep:
    """The step that a rank runs."""
    data = plan.mesh.ranks_of(AxisRole.DATA)
    return RankStep(
        rows=batch.global_batch // (data * batch.micro_batches),
        tokens=batch.sequence,
        micro_batches=batch.micro_batches,
        dtype="float32" if assume_fp32_steps(plan, facts) else "",
        optimizer=request.optimizer,
        attention=request.attention,
    )


RUN = 1
"""The number of plans found by a search that are run and fit: each costs some ten seconds."""


def run_first(
    candidates: Candidates, best: Sequence[Candidate], request: Request
) -> Iterator[Candidate]:
    """The plans of a search, of which the first are run, each at the pipeline rank that
    the estimate has as the fullest. One that then needs more memory than there is is left out; one
    that a rank alone cannot run stays as it was.
    """
    left = RUN
    with RankRunner() as runner:
        for candidate in best:
            counted = _count(candidates, candidate, request, runner) if left else None
            usable = candidate.estimate.usable
            if counted and counted > usable:
                reason = f"run, needs more than the usable {usable / GIB:.1f} GiB"
                candidates.tally.exclude(reason, f"{candidate.label}: {counted / GIB:.1f} GiB")
                continue
            left -= bool(left)
            yield replace(candidate, counted=counted)


def _count(
    candidates: Candidates, candidate: Candidate, request: Request, runner: RankRunner
) -> float | None:
    compiled = candidates.compile(candidate.choice, Sink())
    if compiled.applied is None:
        return None
    batch = replace(candidates.batch, micro_batches=candidate.micro_batches)
    step = _step(*compiled.applied, request, batch)
    try:
        return count(compiled, step, runner, places=(candidate.estimate.fullest.rank,))[0].peak
    except NotCountedError:
        return None


def _memory(rank: CountedRank, plan: Plan) -> RankMemory:
    def item(name: str, size: int) -> Item:
        return Item(name=name, size=size, how="counted", origin=_origin(name, plan))

    moments = (
        Moment(name=name, items=tuple(item(*pair) for pair in held.items()))
        for name, held in rank.moments.items()
    )
    return RankMemory(rank=rank.place, moments=tuple(moments))


def _origin(name: str, plan: Plan) -> Span | None:
    """The line of a plan that decides what is held."""
    if name in _BY_UNITS:
        return plan.fsdp.origin if plan.fsdp else None
    _, _, where = name.partition(" of ")
    units = plan.fsdp.units if plan.fsdp else ()
    rules = (*((r.modules, r.origin) for r in plan.checkpoint_rules), *_members(units))
    return next((at for those, at in rules if generic(those.first_name) == where), None)


def _members(units: Sequence[Unit]) -> Iterator[tuple[Modules, Span]]:
    for unit in units:
        yield from ((modules, unit.origin) for modules in unit.members)


def text(measured: MeasuredRanks) -> Iterator[str]:
    """The lines of what `planc measure` says."""
    answer, batch = measured.answer, measured.answer.request.batch
    assert batch is not None
    on, tokens = phrases.mesh(answer.plan.mesh.axes), f"{batch.global_batch} x {batch.sequence}"
    yield f"{answer.plan.name} on {on}, {tokens} tokens a step; {answer.hardware.name}"
    where = f"on {measured.device}" if measured.device else "on fake tensors"
    images = (
        describe(measured.images, answer.facts.config, measured.image_size)
        if measured.images
        else ""
    )
    yield f"two steps of one rank, {where}, with {'; '.join(assumptions(answer, images))}"
    yield ""
    for memory, run in sorted(_both(measured), key=lambda both: -both[0].peak):
        yield from _rank(memory, run, measured)
    estimated = answer.estimate.ranks
    yield ""
    for rank, run in _both(measured):
        place = f" on pipeline rank {rank.rank}" * (len(estimated) > 1)
        size, (unit, of) = estimated[rank.rank].peak, unit_of(rank.peak)
        beside = "" if run.missed else f", {size / rank.peak - 1:+.1%}"
        beside += ", of text alone" * bool(measured.images)
        yield f"estimated{place}: {size / of:.2f} {unit}{beside}"
    if measured.estimate_is_off:
        off = f"the estimate is more than {FAR:.0%} off"
        yield f"warning: {off}; believe the run, and report the plan"
    parts = {"layers": measured.layers, "microbatches": measured.microbatches}
    samples = [f"{' and '.join(map(str, n))} {what}" for what, n in parts.items() if len(n) > 1]
    if samples:
        which = ", ".join(samples)
        yield f"run with {which}, which the rest follows from; --exact runs all of them"
    yield _NOT_MEASURED if measured.device else _NOT_COUNTED


_NOT_COUNTED = "not counted: buffers of the network's library, and what kernels need while they run"
_NOT_MEASURED = (
    "not measured: collectives, which return at once, what overlaps with them, and buffers of the "
    "network's library"
)


def _both(measured: MeasuredRanks) -> Iterator[tuple[RankMemory, CountedRank]]:
    return zip(measured.counted.ranks, measured.ranks, strict=True)


def _rank(rank: RankMemory, run: CountedRank, measured: MeasuredRanks) -> Iterator[str]:
    room = measured.counted.usable
    place = f", pipeline rank {rank.rank}" * (len(measured.answer.estimate.ranks) > 1)
    unit, of = unit_of(rank.peak)
    reached = "when there was no more" if run.missed else "at most"
    most = f"{rank.peak / of:.2f} {unit} {reached} ({rank.largest.name}{place})"
    verdict = VERDICTS[rank.peak <= room and not run.missed]
    usable = f"{room / GIB:.1f}{' GiB' * (unit != 'GiB')} usable"
    yield f"memory of a rank: {most}; {usable}: {verdict}"
    yield from held_lines(rank, least=rank.peak / 1000)
    if run.reserved:
        yield f"  {run.reserved / of:8.2f}  reserved by the allocator"
    if run.missed:
        said = f"out of memory ({run.missed.moment}) for {run.missed.what}"
        yield said + _line(run.missed.what, measured.answer.plan)
        yield f"  {run.missed.said}"
    if run.seconds:
        whole = sum(run.seconds.values())
        yield f"compute of a step{place}: {whole:.3f} s"
        for part, seconds in sorted(run.seconds.items(), key=lambda item: -item[1]):
            if seconds > whole / 1000:
                line = _line(part, measured.answer.plan) if part.startswith("recomputation") else ""
                yield f"  {seconds * 1e3:8.1f}  ms {part}{line}"


def _line(name: str, plan: Plan) -> str:
    origin = _origin(name, plan)
    return f"  ({origin.place})" if origin else ""


def plain(measured: MeasuredRanks) -> dict[str, Any]:
    """The same as plain data, in the form of an estimate's; bytes."""
    counted = document(replace(measured.answer, estimate=measured.counted))
    return {
        **{name: value for name, value in counted.items() if name != "time"},
        "not_counted": [] if measured.images else counted["not_counted"],
        "images": measured.images,
        "device": measured.device or "fake",
        "fits": measured.fits,
        "layers": measured.layers,
        "microbatches": measured.microbatches,
        "compute": [dict(rank.seconds) for rank in measured.ranks],
        "estimate_is_off": measured.estimate_is_off,
        "out_of_memory": [rank.missed and rank.missed._asdict() for rank in measured.ranks],
        "estimated": [rank.peak for rank in measured.answer.estimate.ranks],
    }
