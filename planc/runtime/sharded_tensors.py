"""FSDP units, and shards of Megatron-FSDP, whose offsets only the package knows."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planc.runtime.standalone.shards import CHUNK_LIST, reshard_units, splits


def reshard(model: nn.Module) -> None:
    """Reshards all units: a unit that stays unsharded after forward has no shards in place."""
    reshard_units(model)
    owner = megatron_of(model)
    if owner is not None:
        owner._replace_param_with_distributed_if_needed()
        _measure(model)


def sharded_like(part: Tensor, like: DTensor) -> DTensor:
    """A tensor of the layout of another one, whose shard on this rank is `part`."""
    return DTensor.from_local(
        part.detach(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


# Megatron-FSDP -----------------------------------------------------------------------------------


def megatron_of(model: nn.Module) -> Any:
    """The model that Megatron-FSDP wraps around this one, None for torch's FSDP."""
    return getattr(next(model.parameters(), None), "_megatron_fsdp_model", None)


def with_chunk_of(tensor: Tensor, other: Tensor) -> Tensor:
    """The same tensor, with the chunk that Megatron-FSDP recorded on another of its layout."""
    known = getattr(getattr(other, "_local_tensor", None), CHUNK_LIST, None)
    if known is not None and isinstance(tensor, DTensor) and tensor.shape == other.shape:
        setattr(tensor._local_tensor, CHUNK_LIST, known)
    return tensor


def _measure(model: nn.Module) -> None:
    """Makes the package record the chunk of each shard, once; every rank must call it."""
    from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

    for parameter in model.parameters():
        sharded = isinstance(parameter, DTensor) and any(map(splits, parameter.placements))
        if sharded and not hasattr(parameter._local_tensor, CHUNK_LIST):
            update_uneven_dtensor_chunk_metadata(parameter)
