"""One rank of a proof on processes: its training steps, and their distance from one process."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import distributed, nn

from planc.model.sources.huggingface import quiet
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.proxy.user_model import ModelBuilder
from planc.runtime.executor import apply_for_reference, apply_lowered
from planc.runtime.preconditions import of_all_ranks
from planc.simulate import numerics, program
from planc.simulate.batches import Batches, batches
from planc.simulate.outcome import PARAMETER_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The errors of one rank, those that pass by kind, whether rounded numbers choose experts."""

    logits: float
    loss: float
    gradients: dict[str, float]
    norm: float
    parameters: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    chooses: bool = False


@quiet()
def prove(
    builder: ModelBuilder,
    lowered: Lowered,
    digest: str,
    seed: int,
    report: Callable[[str], None],
    *,
    device: str = "cpu",
    precision: bool = False,
) -> Errors:
    """The errors of this process, which is one rank of a process group, for one seed of weights and
    data; the arguments are those of `train`.
    """
    result, reference, data = train(builder, lowered, digest, seed, report, device=device)
    if precision:
        return compare_rounded(result, reference, lowered, _operations(builder, data, seed))
    return compare(result, reference)


def train(
    builder: ModelBuilder,
    lowered: Lowered,
    digest: str,
    seed: int,
    report: Callable[[str], None],
    *,
    device: str,
    traced: bool = False,
) -> tuple[program.RankResult, program.Reference, Batches]:
    """Trains this rank and the single process: their results, and the batches.

    Args:
        report: called with each phase: `single`, `apply`, `parallel`, `compare`.
        traced: whether the rank's modules are watched.

    Raises:
        SingleError: the model does not train in a single process.
    """
    report("single")

    def build() -> nn.Module:
        return numerics.for_trial(builder.build(seed).to(device), lowered)

    data = batches(builder, lowered, seed).to_device(device)
    single = apply_for_reference(build(), lowered)
    reference = program.train_single(single, data, lowered)
    if reference.draws and lowered.pipeline is not None:
        raise program.SingleError(
            "the random numbers of a pipeline's microbatches are not compared"
        )
    if reference.draws and lowered.split_axes(AxisRole.SEQUENCE):
        raise program.SingleError(program.DRAWS_PARTS)
    report("apply")
    if reference.uneven and lowered.fsdp_units:
        uneven_use = reference.uneven[0]
        raise RuntimeError(
            f"only some data ranks use `{uneven_use.name}`: {uneven_use.where} (PL512)"
        )
    model = build()
    program.seed_rank(distributed.get_rank())
    run = apply_lowered(model, lowered, digest=digest, device_type=device, allow_code=True)
    report("parallel")
    result = program.RankResult()
    draws, steered = reference.draws, () if reference.draws else reference.steered
    program.train_rank(model, run, data, result, traced=traced, draws=draws, steered=steered)
    report("compare")
    if reference.draws:
        single = apply_for_reference(build(), lowered)
        drawn_by_rank = of_all_ranks((result.data_rank, result.drawn))
        ranks = [program.RankResult(data_rank=rows, drawn=drawn) for rows, drawn in drawn_by_rank]
        reference = program.train_single(single, data, lowered, ranks)
    return result, reference, data


def _operations(builder: ModelBuilder, batches: Batches, seed: int) -> numerics.Operations:
    """The operations of a forward pass."""
    model, first = builder.build(seed), batches.steps[0][0]
    operations = numerics.Operations()
    with torch.no_grad(), operations:
        model(**{name: value.cpu() for name, value in first.inputs.items()})
    return operations


def compare(result: program.RankResult, reference: program.Reference) -> Errors:
    """The errors of one rank that has ended."""
    right = reference.passes[result.data_rank]
    if len(result.logits) != len(right.logits):
        raise program.SingleError("the model gives logits on one side only")
    return Errors(
        logits=max(
            map(numerics.relative, result.logits, result.local_logits(right.logits)), default=0.0
        ),
        loss=max(map(numerics.relative, result.losses, right.losses)),
        gradients=numerics.errors_by_name(result.gradients, reference.gradients),
        norm=_norm(list(map(numerics.relative, result.norms, reference.norms))),
        parameters=_updates(result, reference),
    )


def _updates(result: program.RankResult, reference: program.Reference) -> dict[str, float]:
    """The error of each parameter after the last step: of its value, of its change where Muon made
    or a class of the user's made it (it may be far less than the value), and of its optimizer
    state.
    """
    errors = numerics.errors_by_name(result.parameters, reference.parameters)
    states, wanted = result.states, reference.states
    rounded = {_owner(key) for key, state in wanted.items() if state.dtype == torch.bfloat16}

    def count(name: str, error: float) -> None:
        errors[name] = max(errors.get(name, 0.0), error / (_ROUNDED if name in rounded else 1.0))

    for name, before in reference.before.items():
        if errors.get(name, math.inf) < math.inf:
            mine, right = (r.parameters[name] - before for r in (result, reference))
            count(name, numerics.relative(mine, right, _STEPS * float(before.abs().max())))
    for key, error in numerics.errors_by_name(states, wanted).items():
        alike = key in states and key in wanted and states[key].dtype == wanted[key].dtype
        eight = alike and program.IN_EIGHT_BITS in key  # a number may fall to the next code
        off = numerics.norm_error(states[key], wanted[key]) if eight else error
        count(_owner(key), off if alike else math.inf)
    return errors


_STEPS = 8 * numerics.UNIT_ROUNDOFF["float32"] / PARAMETER_LIMIT
"""The least change, relative to the value, of which the rounding of two steps is no error."""
_ROUNDED = 4 * numerics.UNIT_ROUNDOFF["bfloat16"] / PARAMETER_LIMIT
"""The additional error of a parameter whose optimizer state is rounded to bfloat16."""


def _owner(key: str) -> str:
    """The parameter of an optimizer state, `NAME (STATE)`."""
    return key.partition(" ")[0]


def _norm(errors: Sequence[float]) -> float:
    """The error of the norms of all steps.

    After the first step the weights differ by rounding that the optimizer enlarges, so that later
    norms, as the weights, are wrong above `PARAMETER_LIMIT`.
    """
    return max((e for i, e in enumerate(errors) if i == 0 or e > PARAMETER_LIMIT), default=0.0)


def compare_rounded(
    result: program.RankResult,
    reference: program.Reference,
    lowered: Lowered,
    operations: numerics.Operations,
) -> Errors:
    """The errors of one rank under the plan's mixed precision, in the 2-norm, and their limits."""
    right, gradients = reference.passes[result.data_rank], reference.gradients
    floor = numerics.NEGLIGIBLE * max(float(gradient.norm()) for gradient in gradients.values())
    limit = numerics.tolerance(lowered, operations.count)
    return Errors(
        logits=max(
            map(numerics.norm_error, result.logits, result.local_logits(right.logits)), default=0.0
        ),
        loss=max(map(numerics.norm_error, result.losses, right.losses)),
        gradients=numerics.errors_by_name(result.gradients, gradients, numerics.norm_error, floor),
        norm=numerics.norm_error(result.norms[0], reference.norms[0]),
        limits=dict.fromkeys(("logits", "loss", "gradients", "norm"), limit),
        chooses=operations.chooses,
    )
