"""Trains the small model on one rank, with and without the plan, and compares.

Errors are relative: the largest absolute difference of a tensor over the largest absolute value of
the right one. For a tensor that is negligible among its kind (a gradient that is zero up to
rounding), the divisor is a floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from planc.model.small.input_search import BatchShape, rank_slice
from planc.model.small.user_model import ModelBuilder
from planc.ops.fsdp import Divide
from planc.ops.lowered import Lowered
from planc.runtime.executor import alone, apply_lowered
from planc.runtime.run import Run
from planc.runtime.standalone.shards import in_own_order, plain_name, rank_orders

LENGTH = 16
"""The least tokens per row; divisible for sequence axes of up to 16 ranks."""
RATE = 1e-3
EPSILON = 1e-6
"""AdamW's epsilon. With torch's 1e-8, a gradient that is zero up to rounding changes a weight as
much as a real one, so the steps would compare noise."""
STEPS = 2
FLOOR = 1e-3
"""The least divisor of a relative error, as a fraction of the largest value among all tensors."""

Report = Callable[[str], None]


class SingleError(Exception):
    """The model does not train in a single process, so there is no reference."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """The results of training: full tensors, for the rows of one rank.

    Args:
        logits: of the first step, before any update.
        loss: of the first step, over all rows.
        gradients, parameters: by name; gradients of the first step, parameters after the last.
    """

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def device_for(ranks: int) -> str:
    """`cuda` if there is a device for every rank, else `cpu`; does not initialize CUDA."""
    return "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def prove(
    builder: ModelBuilder,
    lowered: Lowered,
    digest: str,
    seed: int,
    report: Report,
    *,
    device: str = "cpu",
) -> dict[str, Any]:
    """Compares the parallel model with the single one for one seed.

    Args:
        builder: builds the small model.
        lowered: the plan for it, for the ranks of this process group.
        digest: the digest of `lowered`.
        seed: the seed of weights and data.
        report: called with each phase: `single`, `apply`, `parallel`, `compare`.
        device: `cpu` or `cuda` (the current device).

    Returns:
        The errors on this rank: `logits`, `loss`, `gradients` and `parameters`, the last two by
        parameter name.

    Raises:
        SingleError: in a single process the model has no loss, no gradient, or a value that is not
            finite.
    """
    report("single")
    batches = [to_device(batch(builder, lowered, seed, step), device) for step in range(STEPS)]
    scale = gradient_scale(lowered)
    single = alone(builder.build(seed).to(device), lowered)
    right = _train(single, batches, mean=lambda loss: loss, scale=scale)
    _require_finite(right)
    report("apply")
    model = builder.build(seed).to(device)
    run = apply_lowered(model, lowered, digest=digest, device_type=device, allow_code=True)
    report("parallel")
    mine = _train(model, [rank_inputs(run, b) for b in batches], mean=_mean)
    rows = rows_of(run, len(right.logits))
    report("compare")
    return {
        "logits": relative(mine.logits, right.logits[rows]),
        "loss": relative(mine.loss, right.loss),
        "gradients": _errors_by_name(mine.gradients, right.gradients),
        "parameters": _errors_by_name(mine.parameters, right.parameters),
    }


def batch(builder: ModelBuilder, lowered: Lowered, seed: int, step: int) -> dict[str, torch.Tensor]:
    """The batch of one step. Ids at the ends of the vocabulary, often special tokens, are not
    used.
    """
    ways = lowered.axis_size(*lowered.data)
    rows, length = ways * max(1, 4 // ways), math.lcm(LENGTH, lowered.world_size)
    return builder.sample(
        BatchShape(rows=rows, length=length, seed=1000 * (step + 1) + seed, ends=8)
    )


def to_device(inputs: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """The inputs on a device."""
    return {name: value.to(device) for name, value in inputs.items()}


def rank_inputs(run: Run, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The slice of a batch that this rank reads."""
    return rank_slice(inputs, run.data_rank, run.data_size)


def gradient_scale(lowered: Lowered) -> float:
    """The factor between the plan's gradients, with its `divide`, and mean gradients."""
    factors = [op.factor for op in lowered.ops if isinstance(op, Divide) and not op.units]
    return lowered.axis_size(*lowered.averaged) / factors[-1] if factors else 1.0


def rows_of(run: Run, count: int) -> slice:
    """The rows that this rank reads, out of `count`."""
    rows = count // run.data_size
    return slice(run.data_rank * rows, (run.data_rank + 1) * rows)


def _mean(loss: torch.Tensor) -> torch.Tensor:
    """The mean of the loss over all ranks, which have equally many tokens."""
    total = loss.clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()


def _train(
    model: nn.Module,
    batches: list[dict[str, torch.Tensor]],
    *,
    mean: Callable[[torch.Tensor], torch.Tensor],
    scale: float = 1.0,
) -> Sample:
    """A few steps of AdamW, on gradients of the loss times `scale`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, eps=EPSILON, foreach=False)
    sample, orders = None, rank_orders(model)
    for inputs in batches:
        output = model(**inputs, use_cache=False)
        loss = getattr(output, "loss", None)
        if loss is None:
            raise SingleError("its forward gives no loss")
        (loss if scale == 1.0 else loss * scale).backward()
        if sample is None:
            sample = Sample(logits=full_copy(output.logits), loss=mean(full_copy(loss)))
            sample.gradients = {
                n: in_own_order(full_copy(p.grad), orders.get(n))
                for n, p in parameters_by_name(model)
                if p.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
    assert sample is not None
    sample.parameters = {
        n: in_own_order(full_copy(p), orders.get(n)) for n, p in parameters_by_name(model)
    }
    return sample


def _require_finite(sample: Sample) -> None:
    """Raises SingleError if the single process has no gradients or values that are not finite."""
    if not sample.gradients:
        raise SingleError("no parameter gets a gradient")
    everything = {"the logits": sample.logits, "the loss": sample.loss, **sample.gradients}
    for name, value in everything.items():
        if not torch.isfinite(value).all():
            raise SingleError(f"{name} is not finite in one process")


def parameters_by_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters by their names before any wrapping."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the full tensor; for a DTensor a collective that every rank must join."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def relative(mine: torch.Tensor, right: torch.Tensor, floor: float = 1e-12) -> float:
    """The relative error; infinite if shapes differ or a value is not finite."""
    if mine.shape != right.shape:
        return math.inf
    if not right.numel():
        return 0.0
    difference = (mine.double() - right.double()).abs().max()
    value = float(difference / right.double().abs().max().clamp_min(floor))
    return value if math.isfinite(value) else math.inf


def _errors_by_name(
    mine: dict[str, torch.Tensor], right: dict[str, torch.Tensor]
) -> dict[str, float]:
    """The error of each tensor; infinite for one that only one side has."""
    top = max((float(t.abs().max()) for t in right.values() if t.numel()), default=0.0)
    return {
        name: relative(mine[name], right[name], top * FLOOR)
        if name in mine and name in right
        else math.inf
        for name in dict.fromkeys((*right, *mine))
    }
