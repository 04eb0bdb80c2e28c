"""FSDP units, and shards of backends, whose offsets only these know."""

from types import ModuleType
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planc.runtime.standalone.shards import CHUNK_LIST, reshard_units

SHARDED_BY: WeakKeyDictionary[nn.Module, ModuleType] = WeakKeyDictionary()
"""The runtime of the backend that shards a model, where that is not torch's FSDP."""


def reshard(model: nn.Module) -> None:
    """Reshards all units: a unit that stays unsharded after forward has no shards in place."""
    reshard_units(model)
    if backend := SHARDED_BY.get(model):
        backend.reshard(model)


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


def with_chunk_of(tensor: Tensor, other: Tensor) -> Tensor:
    """The same tensor, with the chunk that a backend recorded on another of its layout."""
    known = getattr(getattr(other, "_local_tensor", None), CHUNK_LIST, None)
    if known is not None and isinstance(tensor, DTensor) and tensor.shape == other.shape:
        setattr(tensor._local_tensor, CHUNK_LIST, known)
    return tensor
