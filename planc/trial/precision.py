"""How far a plan's own mixed precision may be from a single process in float32.

docs/proof.md derives the tolerance.
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planc.ops.fsdp import FullyShard
from planc.ops.lowered import Lowered

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Half the distance from 1 to the next number: what rounding a result can change it by."""
DEVIATIONS = 3.0
"""How many standard deviations of the sum of rounding errors count as rounding."""

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
    """The largest relative error, in the 2-norm of a tensor, that rounding explains.

    Args:
        lowered: the plan for the small model, with its mixed precision.
        operations: how many operations of a forward pass round.
    """
    units = [op for op in lowered.ops if isinstance(op, FullyShard)]
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
    if mine.shape != right.shape:
        return math.inf
    difference = (mine.double() - right.double()).norm()
    value = float(difference / right.double().norm().clamp_min(floor))
    return value if math.isfinite(value) else math.inf
