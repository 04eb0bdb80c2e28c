"""Models that Megatron-FSDP shards: what they require, and the methods of `Run` for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from planc.runtime.preconditions import stop
from planc.runtime.standalone.shards import CHUNK_LIST, splits
from planc.sections.megatron_fsdp.standalone import prepare_optimizer

DEVICES = ("cuda",)
"""The devices that the package supports: it calls `torch.cuda.current_device()` first."""


def require(device: str) -> None:
    """Checks that a plan with `backend = megatron` can run here.

    Raises:
        PlanError: PL499, megatron_fsdp cannot be imported, or the device is not CUDA.
    """
    if find_spec("megatron_fsdp") is None:
        message = "the plan has `backend = megatron`, and megatron-fsdp cannot be imported"
        raise stop("PL499", message, help="pip install 'planc[megatron]'")
    if device not in DEVICES:
        message = f"Megatron-FSDP runs only on CUDA, and this run is on {device}"
        help = "put the model on a CUDA device, or remove `backend = megatron`"
        raise stop("PL499", message, help=help)


def optimizer(given: Optimizer) -> Optimizer:
    """Prepares an optimizer of the model's parameters for Megatron-FSDP, and returns it."""
    if not hasattr(given.param_groups[0]["params"][0], "_megatron_fsdp_model"):
        raise ValueError(
            "the optimizer has parameters that are not in this model: create it after the plan "
            "was applied"
        )
    prepared: Optimizer = prepare_optimizer(given)
    return prepared


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside accumulate gradients; the next one after all-reduces the sum.

    Sharded gradients are still reduce-scattered in each pass, and accumulate in shards.
    """
    wrapper = _wrapper(model)
    wrapper.set_model_auto_sync(False)
    wrapper.is_last_microbatch = False
    try:
        yield
    finally:
        wrapper.is_last_microbatch = True
        wrapper.set_model_auto_sync(True)


def copy_to_forward_weights(model: nn.Module) -> None:
    """Copies the optimizer's parameters, which were loaded, to those of the forward pass."""
    _wrapper(model).install_optimized_model_weights()


def reshard(model: nn.Module) -> None:
    """Puts the shards in place, and makes the package record the chunk of each, once; every rank
    must call it.
    """
    from planc.compat.megatron_fsdp import update_uneven_dtensor_chunk_metadata

    _wrapper(model)._replace_param_with_distributed_if_needed()
    for parameter in model.parameters():
        sharded = isinstance(parameter, DTensor) and any(map(splits, parameter.placements))
        if sharded and not hasattr(parameter._local_tensor, CHUNK_LIST):
            update_uneven_dtensor_chunk_metadata(parameter)


def _wrapper(model: nn.Module) -> Any:
    """The model that Megatron-FSDP wraps around this one."""
    return next(model.parameters())._megatron_fsdp_model
