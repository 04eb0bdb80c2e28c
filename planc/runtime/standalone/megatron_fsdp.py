"""Megatron-FSDP as a plan uses it; emitted scripts inline this without its types.

Source: megatron_fsdp 0.6.1. Its model is a wrapper whose forward replaces the
parameters that the optimizer works on by those that it computes with; a hook does the
same for the model itself, so that a training script goes on calling that.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer


def unit_classes(model: nn.Module, names: list[str]) -> list[type]:
    """The classes of a model's modules with one of these names, in the names' order."""
    found = {
        type(module) for module in model.modules() if type(module).__name__ in names
    }
    return sorted(found, key=lambda cls: (names.index(cls.__name__), cls.__module__))


def in_place(model: nn.Module, wrapped: Any) -> None:
    """Makes the model itself what one calls; optimizers that were not readied raise."""
    from weakref import WeakSet, ref

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    model.register_forward_pre_hook(
        lambda *_: wrapped._replace_param_with_raw_if_needed(), prepend=True
    )
    known: WeakSet[Optimizer] = WeakSet()
    wrapped.optimizers = known
    mine = ref(wrapped)

    def guard(optimizer: Any, args: Any, kwargs: Any) -> None:
        owner = getattr(
            optimizer.param_groups[0]["params"][0], "_megatron_fsdp_model", None
        )
        if owner is not None and owner is mine() and optimizer not in known:
            raise RuntimeError(
                "this optimizer would not change what Megatron-FSDP computes with: "
                "hand it to planc's `run.optimizer`, or to "
                f"`{prepare_optimizer.__name__}`, before it steps"
            )

    register_optimizer_step_pre_hook(guard)


def prepare_optimizer(optimizer: Any) -> Any:
    """Readies an optimizer of the model's parameters, and returns it.

    The package would have it make its state by a step on gradients of zero, which
    decays weights and counts as a step: that one is left out.
    """
    import megatron_fsdp

    owner = optimizer.param_groups[0]["params"][0]._megatron_fsdp_model
    owner.optimizers.add(optimizer)
    optimizer.step = lambda: None
    return megatron_fsdp.fully_shard_optimizer(optimizer)
