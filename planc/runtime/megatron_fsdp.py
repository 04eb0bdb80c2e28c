"""A model that Megatron-FSDP shards: what must be there, the call, and what a run asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from torch import nn
from torch.optim import Optimizer

from planc.ops.lowered import Lowered
from planc.ops.megatron_fsdp import MegatronShard
from planc.runtime.preconditions import stop
from planc.runtime.sharded_tensors import megatron_of
from planc.runtime.standalone.megatron_fsdp import prepare_optimizer

DEVICES = ("cuda",)
"""Where the package runs: its first lines ask for `torch.cuda.current_device()`."""


def require(lowered: Lowered, device: str) -> None:
    """What a plan with `backend = megatron` needs is there.

    Args:
        lowered: the plan.
        device: the type of device that the run is on.

    Raises:
        PlanError: PL499, there is no megatron_fsdp, or no CUDA.
    """
    if not called(lowered):
        return
    if find_spec("megatron_fsdp") is None:
        raise stop(
            "PL499",
            "the plan has `backend = megatron`, and megatron-fsdp cannot be imported",
            help="pip install 'planc[megatron]'",
        )
    if device not in DEVICES:
        raise stop(
            "PL499",
            f"Megatron-FSDP runs only on CUDA, and this run is on {device}",
            help="put the model on a CUDA device, or remove `backend = megatron`",
        )


def called(lowered: Lowered) -> bool:
    """Whether Megatron-FSDP shards the model."""
    return any(isinstance(op, MegatronShard) for op in lowered.ops)


# The handle --------------------------------------------------------------------------------------


def optimizer(given: Optimizer) -> Optimizer:
    """An optimizer of the model's parameters, made to step with the package."""
    if not hasattr(given.param_groups[0]["params"][0], "_megatron_fsdp_model"):
        raise ValueError(
            "the optimizer has parameters that are not in this model: create it after the plan "
            "was applied"
        )
    prepared: Optimizer = prepare_optimizer(given)
    return prepared


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside add up; the next one after sums over the ranks what is left to sum.

    Where gradients are sharded each pass is reduced all the same: they add up in shards.
    """
    own = megatron_of(model)
    own.set_model_auto_sync(False)
    own.is_last_microbatch = False
    try:
        yield
    finally:
        own.is_last_microbatch = True
        own.set_model_auto_sync(True)


def installed(model: nn.Module) -> None:
    """What was read into the optimizer's weights goes on to those that the model computes with."""
    megatron_of(model).install_optimized_model_weights()


def refuse(lowered: Lowered, what: str, told: str) -> None:
    """Stops what planc does with torch's FSDP alone.

    Raises:
        PlanError: PL499, the plan has `backend = megatron`.
    """
    if called(lowered):
        raise stop(
            "PL499", f"`{what}` is not supported for a model that Megatron-FSDP shards", help=told
        )
