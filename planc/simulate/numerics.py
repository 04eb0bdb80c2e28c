"""Compares tensors of a parallel model with those of a single process.

Errors are relative: the largest absolute difference of a tensor over the largest absolute value of
the right one. For a tensor that is negligible among its kind (a gradient that is zero up to
rounding), the divisor is a floor.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planc.compat.trees import TorchDispatchMode
from planc.ops.fsdp import Divide
from planc.ops.lowered import Lowered
from planc.proxy.user_model import ModelBuilder
from planc.runtime.standalone.shards import plain_name

FLOOR = 1e-3
"""The least divisor of a relative error, as a fraction of the largest value among all tensors."""
NEARLY = 1e-2
"""The largest relative error of a number that rounding may explain."""


def device_for(ranks: int) -> str:
    """`cuda` if there is a device for every rank, else `cpu`; does not initialize CUDA."""
    return "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def trial_dtype(lowered: Lowered) -> torch.dtype:
    """The dtype of a simulation: float64 if every operation that requires a dtype requires
    float64, else float32.
    """
    dtypes = {op.simulation_dtype for op in lowered.ops} - {None}
    return torch.float64 if dtypes == {"float64"} else torch.float32


def for_trial(model: nn.Module, lowered: Lowered) -> nn.Module:
    """Returns the model in the dtype of the simulation (`trial_dtype`)."""
    return model if trial_dtype(lowered) == torch.float32 else in_float64(model)


def in_float64(model: nn.Module) -> nn.Module:
    """Converts a model to float64, in place, with experts computed by plain matmuls."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # torch has no grouped product in float64
    return model.double()


class InFloat64:
    """A model builder that converts another builder's models and batches to float64."""

    def __init__(self, builder: ModelBuilder) -> None:
        self.builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    def build(self, seed: int) -> nn.Module:
        return in_float64(self.builder.build(seed))

    def sample(self, shape: Any) -> dict[str, torch.Tensor]:
        inputs = self.builder.sample(shape).items()
        return {n: v.double() if v.is_floating_point() else v for n, v in inputs}


def gradient_scale(lowered: Lowered) -> float:
    """The factor between the plan's gradients, with its `divide`, and mean gradients."""
    factors = [op.factor for op in lowered.find_ops(Divide) if not op.units]
    return lowered.axis_size(*lowered.averaged_axes) / factors[-1] if factors else 1.0


def parameters_by_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters by their names before any wrapping."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the full tensor; for a DTensor a collective that every rank must join."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the full gradients by the names of parameters; collective for DTensors."""
    named = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return {name: full_copy(gradient) for name, gradient in named}


def _same_shape(mine: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the shapes are equal; a scalar parameter has one element under FSDP."""
    shape, other = tuple(mine.shape), tuple(right.shape)
    return shape == other or (shape == (1,) and other == ())


def relative(mine: torch.Tensor, right: torch.Tensor, floor: float = 1e-12) -> float:
    """The relative error; infinite if shapes differ or a value is not finite."""
    if not _same_shape(mine, right):
        return math.inf
    if not right.numel():
        return 0.0
    difference = (mine.double() - right.double()).abs().max()
    value = float(difference / right.double().abs().max().clamp_min(floor))
    return value if math.isfinite(value) else math.inf


def errors_by_name(
    mine: dict[str, torch.Tensor],
    right: dict[str, torch.Tensor],
    error: Callable[[torch.Tensor, torch.Tensor, float], float] = relative,
    floor: float | None = None,
) -> dict[str, float]:
    """The error of each tensor; infinite for one that only one side has. The floor is by default
    that of relative errors.
    """
    if floor is None:
        floor = FLOOR * max((float(t.abs().max()) for t in right.values() if t.numel()), default=0)
    return {
        name: error(mine[name], right[name], floor) if name in mine and name in right else math.inf
        for name in dict.fromkeys((*right, *mine))
    }


UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Half the distance from 1 to the next number: the relative error of rounding a result."""
DEVIATIONS = 3.0
"""The number of standard deviations of the sum of rounding errors that count as rounding."""

NEGLIGIBLE = 1e-2
"""The least divisor of a gradient's error, as a fraction of the largest gradient: one that is zero
up to rounding (the bias of a key, behind a softmax) is nothing but rounding."""

_EXACT = frozenset({"_unsafe_view", "clone", "cat", "stack", "copy_", "where", "neg", "embedding"})
"""Operations that copy numbers and are no views."""


class Operations(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Counts the operations of a pass that round: those that compute new floating point numbers.

    `chooses` is whether the pass also selects by such numbers, as a router selects experts: a
    rounded number selects another one where two are close, and no tolerance covers that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0
        self.chooses = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        computed = isinstance(first, torch.Tensor) and first.is_floating_point()
        name = getattr(func, "overloadpacket", func).__name__
        self.chooses = self.chooses or (computed and name == "topk")
        self.count += computed and not func.is_view and name not in _EXACT
        return out


def tolerance(lowered: Lowered, operations: int) -> float:
    """The largest relative error, in a tensor's 2-norm, of `operations` that round in a forward."""
    units = lowered.fsdp_units
    compute = max((UNIT_ROUNDOFF[op.param or "float32"] for op in units), default=0.0)
    reduce = max((UNIT_ROUNDOFF[op.reduce or op.param or "float32"] for op in units), default=0.0)
    sums = math.log2(max(2, lowered.world_size))
    variance = (3 * operations * compute**2 + sums * reduce**2) / 3
    return DEVIATIONS * math.sqrt(variance)


def norm_error(mine: torch.Tensor, right: torch.Tensor, floor: float = 1e-12) -> float:
    """The relative error of a tensor in the 2-norm; infinite if shapes differ or it is not finite.

    Args:
        floor: the least divisor: below it a tensor is as good as zero.
    """
    if not _same_shape(mine, right):
        return math.inf
    difference = (mine.double() - right.double()).norm()
    value = float(difference / right.double().norm().clamp_min(floor))
    return value if math.isfinite(value) else math.inf
