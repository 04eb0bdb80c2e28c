"""The estimate of a compiled plan, as data, as text and as a JSON document; what is said where it
does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from planc.diagnostics.diagnostic import Diagnostic, Label, Sink, one_of
from planc.diagnostics.source import Span
from planc.ir.experts import fullest
from planc.ir.nodes import Plan
from planc.ir.optimizer_dtype import assume_fp32_steps
from planc.lowering.step import require_divisible
from planc.model.config import integer_of
from planc.model.facts import Facts
from planc.model.recurrent_states import state_updates
from planc.model.roles import TOWER, lists
from planc.ops import phrases
from planc.ops.base import AxisRole
from planc.ops.optimizer import OptimizerClass
from planc.sections import Hook
from planc.tools.estimate import profiles
from planc.tools.estimate.from_plan import Batch, PlanWork
from planc.tools.estimate.memory import GIB, Item, RankMemory
from planc.tools.estimate.step import Estimate, estimate
from planc.tools.estimate.workload import Layer, Recompute, Workload

if TYPE_CHECKING:
    from planc.compiler import Compiled

FORMAT = 1
"""Raised when a field of the document is removed or changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The settings of an estimate.

    Args:
        batch: of a step; None for parameters, gradients and optimizer state alone.
        hardware, stack: names or paths of profiles.
        hardware_changes: `FIELD=VALUE` of the hardware's fields that are other ones.
        optimizer: a name of `from_plan.OPTIMIZERS`.
        attention: transformers' `attn_implementation`.
        kernels: as of `MicroBatch`.
        layer_kernels: the name or path of a profile of kernels; empty for the plan's own: compiled
            where it compiles blocks, else eager.
        device_memory: bytes of a device in place of the hardware's.
    """

    batch: Batch | None
    hardware: str = "h100-8x"
    hardware_changes: tuple[str, ...] = ()
    stack: str = "torch"
    optimizer: str = "adamw"
    attention: str = "sdpa"
    kernels: bool = True
    layer_kernels: str = ""
    device_memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    Args:
        counted: whether activations and compute are known.
        plan, facts: as checked and lowered, with adapters applied.
        findings: what the compiler and the estimate say, as `planc.estimate` returns them.
    """

    request: Request
    plan: Plan
    facts: Facts
    hardware: profiles.Hardware
    stack: profiles.Stack
    work: Workload
    estimate: Estimate
    counted: bool
    findings: tuple[Diagnostic, ...] = ()

    @property
    def assumes_fp32(self) -> bool:
        """Whether the dtype that the optimizer steps is assumed."""
        return assume_fp32_steps(self.plan, self.facts) is not None

    @property
    def optimizer(self) -> str:
        """The algorithms of the plan's optimizer section, or the one that is asked for."""
        names = (update.name for update in self.work.updates)
        return " and ".join(dict.fromkeys(names)) or self.request.optimizer

    @property
    def passes(self) -> tuple[int, int]:
        """The passes of a rank in a step, and the rows of each."""
        batch, count = self.request.batch, self.work.micro_batches * self.work.runs
        ranks = self.plan.mesh.ranks_of(AxisRole.DATA)
        return count, batch.global_batch // (ranks * count) if batch else 0

    @property
    def complete(self) -> bool:
        """Whether all that a step keeps is counted."""
        return self.counted or not self.request.batch

    @property
    def fits(self) -> bool | None:
        """Whether a rank's memory suffices; None where it does without what is not counted."""
        return self.estimate.fits if self.complete or not self.estimate.fits else None

    def __str__(self) -> str:
        return "\n".join(text(self))


def answer_for(compiled: Compiled, request: Request, sink: Sink) -> Answer | None:
    """The estimate of what was compiled; None without a lowered plan, and after PL705, a lowered
    plan that was named itself.
    """
    if compiled.lowered is None:
        return None
    if compiled.applied is None:
        said = "a lowered plan does not say how its modules are split"
        sink.error("PL705", said, help="name the plan")
        return None
    return answer(*compiled.applied, request, sink)


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
    hardware, stack = hardware_of(request, sink), stack_of(request, plan, sink)
    batch = _possible(plan, request.batch or Batch(global_batch=1, sequence=1), sink)
    work = stack and PlanWork(plan, facts, batch, stack, request.optimizer, kernels=request.kernels)
    if work and request.batch:
        require_divisible(work.of_batch(), plan.mesh, sink)
    if not (hardware and stack and work) or sink.errors > before:
        return None
    counted = None
    if request.batch:
        from planc.tools.estimate.kept_tensors import count

        counted = count(facts, sink, work.micro_batch, attention=request.attention)
    step = work.workload(counted)
    return Answer(
        request=request,
        plan=plan,
        facts=facts,
        hardware=hardware,
        stack=stack,
        work=step,
        estimate=estimate(step, hardware, stack),
        counted=counted is not None,
    )


def hardware_of(request: Request, sink: Sink) -> profiles.Hardware | None:
    """The hardware profile of a request, with its changed fields and memory; None after errors."""
    hardware = profiles.hardware(request.hardware, sink, request.hardware_changes)
    if hardware and request.device_memory:
        return replace(hardware, memory_gib=request.device_memory / GIB)
    return hardware


_KERNELS = Hook[str]("estimate", "KERNELS")
"""The profile of kernels that a section's rules give the layers."""


def stack_of(request: Request, plan: Plan, sink: Sink) -> profiles.Stack | None:
    """The stack of a request with its profile of kernels; None after errors.

    Without a name in the request, the sections of the plan decide the kernels.
    """
    name = request.layer_kernels or next(_KERNELS.find_all(plan.sections), "eager")
    kernels = profiles.kernels(name, sink)
    stack = profiles.stack(request.stack, sink)
    return stack.with_kernels(kernels) if stack and kernels else None


def _possible(plan: Plan, batch: Batch, sink: Sink) -> Batch:
    """The batch with an imbalance that a rank can have; PL585 where another is asked for."""
    ranks = plan.mesh.experts.ranks.size if plan.mesh.experts else 1
    if batch.imbalance <= ranks:
        return batch
    said = f"{ranks} ranks divide experts: one gets at most {ranks} times the mean of tokens"
    none = "no ranks divide experts: all have as many rows as their own tokens take"
    sink.warning(
        "PL585",
        f"the imbalance cannot be {batch.imbalance:g}",
        facts=(said if ranks > 1 else none,),
        help=f"the estimate is for {ranks}",
    )
    return replace(batch, imbalance=float(ranks))


def lines(plan: Plan) -> dict[str, Span]:
    """The line of a plan that decides a part of a step's time, by the part's name in `Spent`."""
    wide = {axis.role: axis.origin for axis in reversed(plan.mesh.axes) if axis.size > 1}
    section = plan.fsdp
    offload = section.offload.origin if section and section.offload else None
    offloaded = (rule.origin for rule in plan.checkpoint_rules if rule.hosts)
    stages = plan.pipeline.op.origin if plan.pipeline else None
    found = {
        "tensor_collectives": wide.get(AxisRole.TENSOR),
        "context_collectives": wide.get(AxisRole.SEQUENCE),
        "expert_collectives": plan.experts[0].origin if plan.experts else None,
        "data_collectives": section.origin if section else None,
        "host_copies": next(offloaded, offload),
        "pipeline_sends": stages,
        "pipeline_bubble": stages,
        "optimizer": plan.optimizer[0].origin if plan.optimizer else offload,
    }
    return {name: origin for name, origin in found.items() if origin}


def judge_fit(found: Answer, sink: Sink) -> None:
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
        *_replicas(found),
        facts=tuple(f"{i.name}: {i.size / GIB:.1f} GiB = {i.how}" for i in items[:4]),
        help=next(_remedies(found), "spread the model over more ranks"),
    )


def _replicas(found: Answer) -> Iterator[Label]:
    """The line for which ranks hold the same parameters."""
    section, replicas = found.plan.fsdp, found.work.replicate
    if section and replicas.size > 1:
        held = ("parameters", "gradients", "optimizer state")
        size = sum(i.size for i in found.estimate.fullest.largest.items if i.name in held)
        text = f"{size / GIB:.1f} GiB are on each of the {replicas.size} ranks of {replicas.name}"
        yield Label(span=section.origin, text=text)


def _remedies(found: Answer) -> Iterator[str]:
    """Changes that make it fit, the fastest step first; then on more ranks."""

    def fitting(changes: Iterator[tuple[str, Workload]]) -> Iterator[tuple[str, Estimate]]:
        made = ((text, estimate(w, found.hardware, found.stack)) for text, w in changes)
        return ((text, changed) for text, changed in made if changed.fits)

    fastest = sorted(fitting(_changes(found)), key=lambda pair: pair[1].time.seconds)
    for text, changed in chain(fastest, fitting(_more_ranks(found))):
        yield f"{text}: {changed.fullest.peak / GIB:.1f} GiB"


def _changes(found: Answer) -> Iterator[tuple[str, Workload]]:
    batch, work, section = found.request.batch, found.work, found.plan.fsdp
    if section and work.replicate.size > 1:
        axes = " * ".join((*section.replicate, *section.shard))
        every = replace(work.data, size=work.data.size * work.replicate.size)
        other = replace(work, data=every, replicate=replace(work.replicate, size=1))
        shard = f"shard over the replicas too, `fsdp on {axes}`"
        yield shard, other
        if (apart := _units(other)) != other:
            yield f"{shard}, with a unit for each block", apart
    if (apart := _units(work)) != work:
        yield "make each block a unit, `$blocks : unit`", apart
    full = _checkpoint_layers(work)
    if full != work:
        yield "checkpoint every layer in full", full
    ranks = found.plan.mesh.ranks_of(AxisRole.DATA)
    rows = batch.global_batch // ranks if batch else 0
    if batch and rows > batch.micro_batches and found.counted:
        smaller = replace(batch, micro_batches=rows)
        again = answer(found.plan, found.facts, replace(found.request, batch=smaller), Sink())
        if again:
            yield f"accumulate gradients over {rows} micro-batches of one row", again.work
            yield (
                "checkpoint every layer, in micro-batches of one row",
                _checkpoint_layers(again.work),
            )


def _more_ranks(found: Answer) -> Iterator[tuple[str, Workload]]:
    work = found.work
    for times in (2, 4, 8, 16, 32, 64):
        more = replace(work.data, size=work.data.size * times)
        yield f"shard over {times} times the ranks", replace(work, data=more)


def _units(work: Workload) -> Workload:
    """The work with the blocks that are in the unit of the whole model in units of their own, of
    which the last one stays gathered.
    """
    layers = [(x, n) for stage in work.stages for x, n in stage if x.root and n > 1]
    own = sum(x.parameters * n for x, n in layers)

    def separate_unit(layer: Layer, n: int) -> Layer:
        if layer.root and n > 1:
            return replace(layer, root=0, resident=1 / n)
        return replace(layer, root=max(0, layer.root - own))

    return work.map_layers(separate_unit) if layers else work


def _checkpoint_layers(work: Workload) -> Workload:
    return work.map_layers(lambda x, n: replace(x, recompute=Recompute.FULL) if n > 1 else x)


# Text --------------------------------------------------------------------------------------------

VERDICTS = {True: "fits", False: "DOES NOT FIT", None: "unknown whether it fits"}


def text(found: Answer, *, explain: bool = False) -> Iterator[str]:
    """The lines of an estimate.

    Args:
        explain: whether each number says how it comes about, and each constant where it is from.
    """
    batch = found.request.batch
    size = f", {batch.global_batch} x {batch.sequence} tokens a step" if batch else ""
    on = phrases.mesh(found.plan.mesh.axes)
    yield f"{found.plan.name} on {on}{size}; {found.hardware.name}, {found.stack.name}"
    yield f"counted with {'; '.join(assumptions(found))}"
    yield ""
    yield from _memory(found, explain)
    if found.counted:
        yield ""
        yield from _time(found)
    if explain:
        yield ""
        yield from _sources(found)


_ASSUMPTIONS = Hook[Callable[[Answer], Iterator[str]]]("estimate", "assumptions")


def assumptions(found: Answer, images: str = "") -> Iterator[str]:
    """Yields the assumptions that no line of the plan states; `images` are those of the step."""
    if found.request.batch:
        yield f"{found.stack.kernels.name} kernels"
        passes, rows = found.passes
        yield f"{passes} micro-batch{'es' * (passes > 1)} of {rows} row{'s' * (rows != 1)} a rank"
        if images:
            yield images
        yield from model_assumptions(found.facts, found.request.batch.sequence, towers=not images)
    experts, asked = found.plan.mesh.experts, found.request.batch
    some = min(asked.imbalance, experts.ranks.size) if experts and asked else 1.0
    if (most := fullest(found.plan, some)) > 1:
        yield f"the experts of the fullest rank get {most:g} times the mean of tokens"
    elif experts and experts.ranks.size > 1 and asked:
        yield "equal shares of tokens for all experts"
    dtype = {4: "fp32", 2: "16 bits", 8: "fp64"}.get(found.work.precision.rest, "8 bits")
    said = "" if found.assumes_fp32 else ", as "
    if found.facts.built:
        said += "the model has them"
    elif found.plan.adapters is not None:
        said += "its adapters have them"
    elif not found.assumes_fp32:
        said += "the plan or the configuration has them"
    if any(a.linear for part in found.work.stages for x, _ in part for a in x.attention):
        yield "linear attention in fused kernels (fla, mamba_ssm)"
    elif not found.request.kernels and state_updates(found.facts):
        yield "states by torch's operators, which hold more than kernels (fla, mamba_ssm)"
    algorithms = (rule.op.algorithm for rule in found.plan.optimizer)
    if own := sorted({str(a.path) for a in algorithms if isinstance(a, OptimizerClass)}):
        yield f"two states for each parameter of {one_of(own, last='and')}, which was not run"
    for assumptions in _ASSUMPTIONS.find_all(found.plan.sections):
        yield from assumptions(found)
    assumed = " (assumed, as docs/training.md has it; `load { dtype = ... }` says another)"
    yield f"{found.optimizer} on parameters in {dtype}{said}{assumed * found.assumes_fp32}"


def model_assumptions(facts: Facts, tokens: int, *, towers: bool = True) -> Iterator[str]:
    """Yields the assumptions about a model whose rows have `tokens` tokens.

    Args:
        towers: whether the step leaves out the towers for images and sound.
    """
    if towers and (blocks := not_counted(facts)):
        inside = one_of(blocks, last="and")
        yield f"text alone: images or sound are not counted, nor what {inside} compute"
    most = integer_of(facts.config, "max_position_embeddings")
    if most and tokens > most:
        yield f"rows of {tokens:,} tokens, more than the {most:,} positions of the model"


def not_counted(facts: Facts) -> list[str]:
    """The lists of blocks of towers for images and sound, of which a step of text runs none."""
    return sorted(str(m) for m in lists(facts) if TOWER.search(str(m)))


def _memory(found: Answer, explain: bool) -> Iterator[str]:
    step = found.estimate
    room = step.usable / GIB
    moment = step.fullest.largest
    place = f", pipeline rank {step.fullest.rank}" * (len(step.ranks) > 1)
    at = f"{moment.name}{place}"
    unit, of = unit_of(step.fullest.peak)
    most = f"{step.fullest.peak / of:.2f} {unit} at most ({at})"
    if not found.complete:
        most = (
            f"at least {step.fullest.peak / of:.2f} {unit}, its activations are not counted ({at})"
        )
    usable = f"{room:.1f}{' GiB' * (unit != 'GiB')} usable"
    yield f"memory of a rank: {most}; {usable}: {VERDICTS[found.fits]}"
    yield from held_lines(step.fullest, explain=explain)
    for rank in step.ranks:
        if rank is not step.fullest:
            yield f"  {rank.peak / GIB:8.2f}  pipeline rank {rank.rank}: {rank.largest.name}"
    if explain:
        copied = max(rank.copied for rank in step.ranks)
        unit, of = unit_of(copied)
        yield (
            f"memory of a rank's host: {copied / of:.2f} {unit} more while a save in the "
            "background writes parameters and states (`run.save(..., asynchronous=True)`)"
        )


def held_lines(rank: RankMemory, *, least: float = 0.0, explain: bool = False) -> Iterator[str]:
    """Yields the peak memory of a rank, a line for each item of at least so many bytes, the largest
    first; then its memory at other times.
    """
    _, of = unit_of(rank.peak)
    for item in sorted(rank.largest.items, key=lambda i: -i.size):
        if item.size < least:
            continue
        place = f"  ({item.origin.place})" if item.origin else ""
        yield f"  {item.size / of:8.2f}  {item.name}{place}"
        if explain:
            yield f"            {item.how}"
    for other in rank.moments:
        if other is not rank.largest:
            yield f"  {other.size / of:8.2f}  at another time: {other.name}"


def unit_of(size: float) -> tuple[str, float]:
    """The unit in which a rank's memory is said, and its bytes."""
    return ("GiB", GIB) if size >= GIB / 10 else ("MiB", GIB / 1024)


def _time(found: Answer) -> Iterator[str]:
    time = found.estimate.time
    half = f" ({time.causal_mfu:.1%} with the causal half of attention)"
    yield (
        f"time of a step: {time.seconds:.3f} s; {time.tokens_per_second:,.0f} tokens/s a rank, "
        f"MFU {time.mfu:.1%}{half * (time.causal_mfu < time.mfu)}"
    )
    said = lines(found.plan)
    for name, seconds in time.spent._asdict().items():
        place = f"  ({said[name].place})" if name in said else ""
        if seconds > 5e-7:
            yield f"  {seconds * 1e3:8.1f}  ms {name.replace('_', ' ')}{place}"
    yield f"bottleneck: {time.bottleneck}"


def _sources(found: Answer) -> Iterator[str]:
    for profile in (found.hardware, found.stack, found.stack.kernels):
        yield f"constants of {profile.name}:"
        for key, source in profile.sources.items():
            yield f"  {key} = {getattr(profile, key)}: {source}"


def document(found: Answer) -> dict[str, Any]:
    """The estimate as plain data; bytes and seconds."""
    step, batch = found.estimate, found.request.batch
    return {
        "format_version": FORMAT,
        "plan": found.plan.name,
        "mesh": {a.name: a.size for a in found.plan.mesh.axes},
        "hardware": found.hardware.name,
        "stack": found.stack.name,
        "kernels": found.stack.kernels.name,
        "batch": batch and {"rows": batch.global_batch, "tokens": batch.sequence},
        "passes": found.passes if batch else None,
        "not_counted": not_counted(found.facts),
        "optimizer": {
            "name": found.optimizer,
            "bytes": found.work.precision.rest,
            "assumed": found.assumes_fp32,
        },
        "fits": found.fits,
        "usable": step.usable,
        "ranks": [
            {
                "peak": rank.peak,
                "largest": rank.largest.name,
                "copied_by_save": rank.copied,
                "moments": [
                    {"name": m.name, "size": m.size, "items": [_plain(i) for i in m.items]}
                    for m in rank.moments
                ],
            }
            for rank in step.ranks
        ],
        "time": found.counted and _plain_time(found),
    }


def _plain_time(found: Answer) -> dict[str, Any]:
    time = found.estimate.time
    return {
        "seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "causal_mfu": time.causal_mfu,
        "bottleneck": time.bottleneck,
        "places": {name: line.place for name, line in lines(found.plan).items()},
        "spent": time.spent._asdict(),
    }


def _plain(item: Item) -> dict[str, Any]:
    place = item.origin.place if item.origin else None
    return {"name": item.name, "size": item.size, "how": item.how, "place": place}
