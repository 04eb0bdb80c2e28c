"""Megatron-FSDP as a plan uses it; emitted scripts inline this without its types.

Source: megatron_fsdp 0.6.1. It wraps the model. The wrapper's forward replaces the
optimizer's parameters by those for computation; a hook does the same for the model
itself, so that a training script can call the model.
"""

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
    """Makes the model callable without its wrapper; unprepared optimizers raise."""
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
                "this optimizer would not update the weights of Megatron-FSDP: "
                "pass it to planc's `run.optimizer`, or to "
                f"`{prepare_optimizer.__name__}`, before it steps"
            )

    register_optimizer_step_pre_hook(guard)


def prepare_optimizer(optimizer: Any) -> Any:
    """Prepares an optimizer of the model's parameters, and returns it.

    To create its state, the package would make a step with zero gradients, which
    decays weights and counts as a step: that step is skipped.
    """
    import megatron_fsdp

    owner = optimizer.param_groups[0]["params"][0]._megatron_fsdp_model
    owner.optimizers.add(optimizer)
    optimizer.step = lambda: None
    return megatron_fsdp.fully_shard_optimizer(optimizer)
