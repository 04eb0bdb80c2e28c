"""Compares tensors of a parallel model with those of a single process.

Errors are relative: the largest absolute difference of a tensor over the largest absolute value of
the right one. For a tensor that is negligible among its kind (a gradient that is zero up to
rounding), the divisor is a floor.
"""

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planc.ops.fsdp import Divide
from planc.ops.lowered import Lowered
from planc.runtime.standalone.shards import plain_name

FLOOR = 1e-3
"""The least divisor of a relative error, as a fraction of the largest value among all tensors."""


def device_for(ranks: int) -> str:
    """`cuda` if there is a device for every rank, else `cpu`; does not initialize CUDA."""
    return "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def gradient_scale(lowered: Lowered) -> float:
    """The factor between the plan's gradients, with its `divide`, and mean gradients."""
    factors = [op.factor for op in lowered.ops if isinstance(op, Divide) and not op.units]
    return lowered.axis_size(*lowered.averaged) / factors[-1] if factors else 1.0


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


def errors_by_name(
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
