"""LoRA by peft: put into a model, given its first values, written and read as peft does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from planc.diagnostic import PlanError
from planc.ops.freeze import Freeze
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
            text = f"the plan has weights in 4 bits, and bitsandbytes cannot be imported: {error}"
            raise stop("PL685", text, help="pip install 'planc[qlora]'") from error


def inject(model: nn.Module, op: Adapt) -> None:
    """Puts LoRA around the layers of an operation, and freezes all but adapters.

    The values drawn are the same on every rank, and the caller's random state stays.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=op.rank,
        lora_alpha=op.alpha,
        lora_dropout=op.dropout,
        init_lora_weights=initial(op),  # type: ignore[arg-type, unused-ignore]
        target_modules=op.pattern,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied layers, and of Conv1D, which peft handles
        torch.manual_seed(op.seed)
        inject_adapter_in_model(config, model)
    if op.dtype is not None:
        for name in op.names():
            for half in _halves(model.get_submodule(name)):
                half.to(getattr(torch, op.dtype))
    setattr(model, _OPS, (*getattr(model, _OPS, ()), op))


def alone(model: nn.Module, lowered: Lowered) -> nn.Module:
    """The model as one process would train it: with a plan's adapters, and frozen as it says."""
    for op in lowered.ops:
        match op:
            case Adapt():
                inject(model, op)
            case Freeze():
                for name in op.modules.names():
                    model.get_submodule(name).requires_grad_(op.trainable)
    return model


def _halves(layer: nn.Module) -> Iterator[nn.Module]:
    for name in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        yield getattr(layer, name)


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
        begin_adapters(model, unset, op.pattern, rank=op.rank, init=initial(op), seed=op.seed)


def initial(op: Adapt) -> bool | str:
    """peft's `init_lora_weights`."""
    return {"default": True, "random": False}.get(op.init, op.init)
