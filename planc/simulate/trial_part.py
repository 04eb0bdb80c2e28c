"""The part of a lowered plan that a simulation runs; imports no torch."""

from collections.abc import Iterator
from dataclasses import replace

from planc.ops.base import Op, SimulationKind
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.registry import AnyOp
from planc.sections import NAMES


def trial_part(
    lowered: Lowered,
    *,
    tensor: bool = False,
    draws: bool = False,
    precision: bool = False,
    section: str = "",
) -> Lowered:
    """Returns the operations that a simulation runs, in float32 unless `precision`, so that results
    differ only by rounding. Outcomes are cached by the digest of this part.

    `tensor` also leaves out FSDP, if no data axis has two ranks. `draws` keeps the dropout of
    adapters. `section` keeps the operations of a section that is simulated separately.
    """
    kinds = {SimulationKind.ALWAYS}
    kinds |= set() if tensor else {SimulationKind.WITH_DATA}
    context = lowered.context()

    def runs(op: AnyOp) -> bool:
        separately = op.SIMULATION is SimulationKind.SEPARATELY and section == op.SECTION
        return separately or op.SIMULATION in kinds

    random = with_random_adapters(lowered, draws=draws)
    part = random.map_ops(
        lambda ops: (op.simplify(context, precision=precision) for op in ops if runs(op))
    )
    return replace(part, stages=tuple(replace(stage, gathered=0) for stage in part.stages))


def separate_ops(lowered: Lowered) -> list[Op]:
    """The operations that are simulated separately; the common simulation has none of them."""
    return [op for op in lowered.ops if op.SIMULATION is SimulationKind.SEPARATELY]


def separate_sections(lowered: Lowered, *, precision: bool = False) -> list[str]:
    """The sections with a separate simulation that can run here."""
    ops = separate_ops(lowered)
    omitted = {op.SECTION for op in ops if op.omission(precision=precision) is not None}
    return [name for name in dict.fromkeys(op.SECTION for op in ops) if name not in omitted]


def separate_limit(lowered: Lowered) -> float | None:
    """The largest relative error that a separate simulation accepts; None for the common one."""
    return max((op.SIMULATION_LIMIT for op in separate_ops(lowered)), default=None)


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
    units = lowered.fsdp_units
    return any({op.param, op.reduce, op.output} - {None, "float32", "float64"} for op in units)


MEAN = "mean over data ranks"
"""The section of a verdict on a plan whose gradients are not the mean of the data ranks' ones."""


def left_out(lowered: Lowered, *, precision: bool = False) -> Iterator[tuple[str, str]]:
    """Yields each setting that a simulation deliberately leaves out or changes, and how."""
    if lowered.summed_gradients:
        yield MEAN, lowered.summed_gradients
    if precision:
        yield "the optimizer", "AdamW makes steps of one size, also of what is only rounding"
    elif rounds(lowered):
        yield "mixed precision", "everything runs in float32"
    ops = sorted(lowered.ops, key=lambda op: (*NAMES, "").index(op.SECTION))
    omissions = (op.omission(precision=precision) for op in ops)
    yield from dict(filter(None, omissions)).items()
