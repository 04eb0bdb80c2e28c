"""The estimate of a compiled plan, and what is said where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planc.diagnostic import Diagnostic, Label, Sink
from planc.estimate import profiles
from planc.estimate.from_plan import Batch, PlanWork
from planc.estimate.moments import GIB
from planc.estimate.step import Estimate, estimate
from planc.estimate.workload import Recompute, Workload
from planc.model.facts import Facts
from planc.ops.base import AxisRole
from planc.plan.ir import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked about a plan.

    Args:
        batch: of a step; None for parameters, gradients and optimizer state alone.
        hardware, stack: names or paths of profiles.
        optimizer: a name of `from_plan.OPTIMIZERS`.
        attention: transformers' `attn_implementation`.
        device_memory: bytes of a device in place of the hardware's.
    """

    batch: Batch | None
    hardware: str = "h100-8x"
    stack: str = "torch"
    optimizer: str = "adamw"
    attention: str = "sdpa"
    device_memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    Args:
        counted: whether activations and compute are known.
        findings: what the compiler and the estimate say, as `planc.estimate` returns them.
    """

    request: Request
    plan: Plan
    hardware: profiles.Hardware
    stack: profiles.Stack
    work: Workload
    estimate: Estimate
    counted: bool
    findings: tuple[Diagnostic, ...] = ()

    def __str__(self) -> str:
        from planc.estimate.render import text  # which is about this class

        return "\n".join(text(self))


def answer(plan: Plan, facts: Facts, request: Request, sink: Sink) -> Answer | None:
    """The estimate of a plan.

    Args:
        plan, facts: as checked and lowered, with adapters applied.
        sink: receives PL700 and PL701 (profiles), PL702 (the batch), PL703 (layers that cannot be
            counted).

    Returns:
        None after an error.
    """
    before = sink.errors
    hardware, stack = profiles.hardware(request.hardware, sink), profiles.stack(request.stack, sink)
    if hardware and request.device_memory:
        hardware = replace(hardware, memory_gib=request.device_memory / GIB)
    work = stack and PlanWork(
        plan, facts, request.batch or Batch(global_batch=1, sequence=1), stack, request.optimizer
    )
    if work and request.batch:
        _divisible(work, sink)
    if not (hardware and stack and work) or sink.errors > before:
        return None
    counted = None
    if request.batch:
        from planc.estimate.kept_tensors import count

        counted = count(
            facts,
            sink,
            batch=work.rows,
            sequence=work.tokens,
            dtype=work.compute_dtype,
            attention=request.attention,
            exchange=work.exchange,
        )
    step = work.workload(counted)
    return Answer(
        request=request,
        plan=plan,
        hardware=hardware,
        stack=stack,
        work=step,
        estimate=estimate(step, hardware, stack),
        counted=counted is not None,
    )


def _divisible(work: PlanWork, sink: Sink) -> None:
    """Whether each rank gets whole rows, and equal parts of a row."""
    batch, ranks = work.batch, work.data_ranks
    parts = (
        (batch.global_batch, "rows", ranks * work.parts, AxisRole.DATA),
        (batch.sequence, "tokens of a row", work.size(AxisRole.SEQUENCE), AxisRole.SEQUENCE),
    )
    for size, what, among, role in parts:
        if size % among:
            axes = work.plan.mesh.of_role(role)
            named = " * ".join(f"{a.name} {a.size}" for a in axes)
            if role is AxisRole.DATA and work.parts > 1:
                named += f" * {work.parts} micro-batches"
            sink.error(
                "PL702",
                f"{size} {what} cannot be split among {among} ({named})",
                *(Label(span=a.origin, text=f"{a.name} is {a.size}") for a in axes[:1]),
                help=f"use a multiple of {among}, or another mesh",
            )


def judge_fit(found: Answer, facts: Facts, sink: Sink) -> None:
    """Reports PL704 where a rank needs more memory than it has, with what would help."""
    if found.estimate.fits:
        return
    fullest, room = found.estimate.fullest, found.estimate.usable
    items = sorted(fullest.largest.items, key=lambda i: -i.size)
    labels = [
        Label(span=i.origin, text=f"{i.name}: {i.size / GIB:.1f} GiB")
        for i in items
        if i.origin and not i.origin.source.argument
    ]
    sink.error(
        "PL704",
        f"a rank needs {fullest.peak / GIB:.1f} GiB ({fullest.largest.name}) and can use "
        f"{room / GIB:.1f} GiB of {found.hardware.memory_gib:g}",
        *labels[:3],
        facts=tuple(f"{i.name}: {i.size / GIB:.1f} GiB = {i.how}" for i in items[:4]),
        help=next(_remedies(found, facts), "spread the model over more ranks"),
    )


def _remedies(found: Answer, facts: Facts) -> Iterator[str]:
    """Changes that make it fit, the cheapest first."""
    for text, other in _changes(found, facts):
        changed = estimate(other, found.hardware, found.stack)
        if changed.fits:
            yield f"{text}: {changed.fullest.peak / GIB:.1f} GiB"


def _changes(found: Answer, facts: Facts) -> Iterator[tuple[str, Workload]]:
    batch = found.request.batch
    full = _checkpointed(found.work)
    if full != found.work:
        yield "checkpoint every layer in full", full
    rows = batch.global_batch // found.work.data.size if batch else 0
    if batch and rows > batch.micro_batches and found.counted:
        smaller = replace(batch, micro_batches=rows)
        again = answer(found.plan, facts, replace(found.request, batch=smaller), Sink())
        if again:
            yield f"accumulate gradients over {rows} micro-batches of one row", again.work
            yield "checkpoint every layer, in micro-batches of one row", _checkpointed(again.work)
    for times in (2, 4, 8, 16, 32, 64):
        ranks = replace(found.work.data, size=found.work.data.size * times)
        yield f"shard over {times} times the ranks", replace(found.work, data=ranks)


def _checkpointed(work: Workload) -> Workload:
    stages = tuple(
        tuple((replace(x, recompute=Recompute.FULL) if n > 1 else x, n) for x, n in stage)
        for stage in work.stages
    )
    return replace(work, stages=stages)
