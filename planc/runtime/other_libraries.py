"""What other libraries would do to a model under a plan, answered with planc's way to do it."""

import functools
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from planc.runtime.preconditions import stop


def require_unwrapped(model: nn.Module) -> None:
    """Refuses a model that peft or torch.compile has changed, for the plan itself does that.

    Raises:
        PlanError: PL489.
    """
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise stop(
            "PL489",
            "peft has put adapters into this model already",
            help="give `apply` the base model; the plan's `adapters` section adds LoRA, and "
            "`run.load_adapters` and `run.save_adapters` read and write peft's files",
        )
    if type(model).__name__ == "OptimizedModule" or model._compiled_call_impl is not None:
        raise stop(
            "PL489",
            "this model is compiled already, and a plan cannot change what is compiled",
            help="remove torch.compile; the plan's `compile` section compiles each block",
        )


def guard_saving(model: nn.Module) -> None:
    """Refuses `model.save_pretrained` of shards, which fails on their storage in transformers."""
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        return

    @functools.wraps(save)
    def of_whole_tensors(*args: Any, state_dict: Any = None, **more: Any) -> Any:
        if state_dict is None and any(isinstance(p, DTensor) for p in model.parameters()):
            raise stop(
                "PL477",
                "`save_pretrained` would write this rank's shards",
                help="`run.export(folder)` writes the same files of the whole model, on all ranks",
            )
        return save(*args, state_dict=state_dict, **more)

    model.save_pretrained = of_whole_tensors
