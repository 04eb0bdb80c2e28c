"""Models that Megatron-FSDP shards: what they require, and the methods of `Run` for them."""

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
"""The devices that the package supports: it calls `torch.cuda.current_device()` first."""


def require(lowered: Lowered, device: str) -> None:
    """Checks that a plan with `backend = megatron` can run here.

    Raises:
        PlanError: PL499, megatron_fsdp cannot be imported, or the device is not CUDA.
    """
    if not lowered.has(MegatronShard):
        return
    if find_spec("megatron_fsdp") is None:
        message = "the plan has `backend = megatron`, and megatron-fsdp cannot be imported"
        raise stop("PL499", message, help="pip install 'planc[megatron]'")
    if device not in DEVICES:
        message = f"Megatron-FSDP runs only on CUDA, and this run is on {device}"
        help = "put the model on a CUDA device, or remove `backend = megatron`"
        raise stop("PL499", message, help=help)


# The handle --------------------------------------------------------------------------------------


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
    wrapper = megatron_of(model)
    wrapper.set_model_auto_sync(False)
    wrapper.is_last_microbatch = False
    try:
        yield
    finally:
        wrapper.is_last_microbatch = True
        wrapper.set_model_auto_sync(True)
