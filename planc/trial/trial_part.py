"""The part of a lowered plan that a trial runs; imports no torch."""

from collections.abc import Iterator
from dataclasses import replace

from planc.model import cache
from planc.ops.backend import Backend
from planc.ops.compile import Compile
from planc.ops.expert_parallel import ALL_TO_ALL, DEEPEP, DispatchExperts
from planc.ops.fsdp import Divide, FullyShard, Prefetch
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.matmul import LowPrecision, ScaleWeights
from planc.ops.pipeline import Pipeline
from planc.ops.quantization import Quantize
from planc.ops.registry import AnyOp

LEFT_OUT = (Compile, Load, Quantize, Backend)
"""The operations that a trial leaves out: compile takes minutes and does not change results by
intent; weights are random; shards of a small weight are not whole quantization blocks, as checked
for a real one; a backend may need a device."""

DATA = (FullyShard, Divide, Prefetch)
"""The operations of the data axes."""

EIGHT_BITS = (LowPrecision, ScaleWeights)
"""The operations of products in 8 bits, which have a trial of their own: their scales are of all
rows of a pass, and what is on the border between two numbers needs float64."""


def trial_part(
    lowered: Lowered,
    *,
    tensor: bool = False,
    draws: bool = False,
    precision: bool = False,
    eight_bits: bool = False,
) -> Lowered:
    """The operations that a trial runs, in float32 unless `precision`, so that results differ only
    by rounding; outcomes are cached by its digest.

    `tensor` leaves out FSDP too, where no data axis has two ranks; `draws` keeps adapters' dropout,
    `eight_bits` products in 8 bits, which are emulated, and everything else runs in float64.
    """
    left_out = (*LEFT_OUT, *(DATA if tensor else ()), *(() if eight_bits else EIGHT_BITS))

    def small(op: AnyOp) -> AnyOp:
        if isinstance(op, LowPrecision):
            return replace(op, emulate=True)
        if isinstance(op, Pipeline):
            # a timetable has passes for its own number of microbatches
            return op if op.timetable else replace(op, microbatches=op.stages)
        if isinstance(op, DispatchExperts) and op.dispatch == DEEPEP:
            return replace(op, dispatch=ALL_TO_ALL)
        return _small_unit(op, lowered, precision=precision) if isinstance(op, FullyShard) else op

    random = with_random_adapters(lowered, draws=draws)
    made = random.map_ops(lambda ops: (small(op) for op in ops if not isinstance(op, left_out)))
    return replace(made, stages=tuple(replace(stage, gathered=0) for stage in made.stages))


def _small_unit(op: FullyShard, lowered: Lowered, *, precision: bool) -> FullyShard:
    """A unit without mixed precision unless asked; it is resharded where ranks are too few."""
    ranks = lowered.axis_size(*op.shard)
    partial = op.reshard if not isinstance(op.reshard, bool) else 0
    reshard = True if partial and (partial >= ranks or ranks % partial) else op.reshard
    made = replace(op, reshard=reshard, gathered=0, saved=0)
    return made if precision else replace(made, param=None, reduce=None, output=None)


def with_random_adapters(lowered: Lowered, *, draws: bool = False) -> Lowered:
    """A plan's operations with random adapters, without dropout unless asked, so that errors in
    adapters show.

    lora_B is initialized with zeros, which makes the gradients of lora_A zero under any plan.
    """

    def random(op: AnyOp) -> AnyOp:
        if not isinstance(op, Adapt):
            return op
        return replace(op, dropout=op.dropout if draws else 0.0, dtype=None, init="random")

    return lowered.map_ops(lambda ops: map(random, ops))


def rounds(lowered: Lowered) -> bool:
    """Whether a plan computes or reduces in less than float32."""
    units = lowered.every(FullyShard)
    return any({op.param, op.reduce, op.output} - {None, "float32", "float64"} for op in units)


def emulates() -> bool:
    """Whether torchao is there, which rounds the operands of products in a trial."""
    return cache.version("torchao") != "none"


def left_out(lowered: Lowered, *, precision: bool = False) -> Iterator[tuple[str, str]]:
    """Yields what a trial deliberately does differently, and how."""
    if precision:
        yield "the optimizer", "AdamW makes steps of one size, also of what is only rounding"
    elif rounds(lowered):
        yield "mixed precision", "everything runs in float32"
    if lowered.has(Quantize):
        yield "4 bits", "frozen weights stay in full precision"
    if lowered.has(LowPrecision) and not emulates():
        yield "matmul", "torchao is not installed: products are not rounded to 8 bits"
    elif lowered.has(LowPrecision) and precision:
        yield "matmul", "products in 8 bits are compared in float64, by a run without `--precision`"
    if any(op.dispatch == DEEPEP for op in lowered.every(DispatchExperts)):
        yield "deepep", "tokens go to their experts by torch's all-to-all, not by DeepEP's kernels"
    if lowered.has(Compile):
        yield "compile", "the modules run uncompiled"
