"""LoRA by peft: put into a model, given its first values, written and read as peft does."""

from __future__ import annotations

from typing import Any

from torch import nn

from planc.diagnostic import PlanError
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.quantization import Quantize
from planc.runtime.preconditions import problem, stop
from planc.runtime.standalone.lora_init import adapter_layers, begin_adapters

NAME = "default"  # of the adapter, peft's own
_OPS = "_planc_adapters"  # where a model keeps the operations that gave it adapters


def adapts(lowered: Lowered) -> tuple[Adapt, ...]:
    return tuple(op for op in lowered.ops if isinstance(op, Adapt))


def missing_peft(lowered: Lowered) -> str | None:
    """Why a plan's adapters can't be made here; None where they can, or where it has none."""
    if not adapts(lowered):
        return None
    try:
        import peft  # noqa: F401
    except ImportError as error:
        return f"the plan has adapters, and peft cannot be imported: {error}"
    return None


def require(lowered: Lowered) -> None:
    """What the adapters of a plan need is there.

    Raises:
        PlanError: PL187, peft cannot be imported; PL685, bitsandbytes cannot.
    """
    if missing := missing_peft(lowered):
        raise PlanError([problem("PL187", missing, help="pip install 'planc[lora]'")])
    if any(isinstance(op, Quantize) for op in lowered.ops):
        try:
            import bitsandbytes  # noqa: F401
        except Exception as error:  # its own libraries may fail to load, in many ways
            text = f"the plan has 4-bit weights, and bitsandbytes cannot be imported: {error}"
            raise stop("PL685", text, help="pip install 'planc[qlora]'") from error


def remember(model: nn.Module, op: Adapt) -> None:
    """Notes on a model the operation that gave it adapters, for `begin`."""
    setattr(model, _OPS, (*getattr(model, _OPS, ()), op))


def layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers, by the names of the layers that they are around."""
    return adapter_layers(model)


# First values ------------------------------------------------------------------------------------


def begin(model: nn.Module, unset: set[str]) -> None:
    """Gives adapters that were on meta the values that they would have had elsewhere.

    Args:
        model: with memory for them by now.
        unset: the plain names of those without a value.
    """
    for op in getattr(model, _OPS, ()):
        begin_adapters(model, unset, op.pattern, rank=op.rank, init=op.initial, seed=op.seed)
