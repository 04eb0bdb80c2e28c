"""Resharding, and DTensors whose shards a backend lays out."""

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from planc.runtime.standalone.shards import CHUNK_LIST, fsdp_units, groups_of, reshard_units

SHARDED_BY: WeakKeyDictionary[nn.Module, ModuleType] = WeakKeyDictionary()
"""The runtime module of the backend that shards a model, if it is not torch's FSDP."""


def reshard(model: nn.Module) -> None:
    """Reshards all units, so that the parameters of the model are their shards.

    Units that stay unsharded after forward have unsharded parameters otherwise.
    """
    reshard_units(model)
    if backend := SHARDED_BY.get(model):
        backend.reshard(model)


def sharded_like(part: Tensor, like: DTensor) -> DTensor:
    """A DTensor with the layout of `like` whose local shard is `part`."""
    return DTensor.from_local(
        part.detach(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def with_chunk_of(tensor: Tensor, other: Tensor) -> Tensor:
    """Copies the chunk metadata that a backend recorded on `other` to a tensor of equal layout."""
    known = getattr(getattr(other, "_local_tensor", None), CHUNK_LIST, None)
    if known is not None and isinstance(tensor, DTensor) and tensor.shape == other.shape:
        setattr(tensor._local_tensor, CHUNK_LIST, known)
    return tensor


def average_whole(model: nn.Module, experts: str) -> None:
    """Averages gradients of `weight.full_tensor()` over data-parallel ranks, as FSDP units do.

    A loss may read a weight itself, such as the head's weight in a fused cross entropy. The
    gradient then reaches the shard without the hooks of its unit, and torch would treat the
    gradient of this rank's rows as that of all rows.

    Args:
        model: a model with a plan applied.
        experts: the mesh dim of expert parallelism, or an empty name. Its ranks read different
            rows. Along other dims outside of the unit, ranks read the same rows.
    """
    for group in (group for unit in fsdp_units(model) for group in groups_of(unit)):
        mesh = group.mesh_info.mesh
        for each in group.fsdp_params:
            names = each.sharded_param.device_mesh.mesh_dim_names or ()
            over = (*range(mesh.ndim), *(i for i, name in enumerate(names) if name == experts))
            placements = [Partial() if i in over else Replicate() for i in range(len(names))]
            averaging = _averaging(placements, group.gradient_divide_factor or mesh.size())
            # where a model is moved or loaded, torch puts other tensors into its parameters
            each.reset_sharded_param = partial(_again, each, averaging, each.reset_sharded_param)
            _again(each, averaging)


def _again(
    each: Any, averaging: Callable[..., Tensor], reset: Callable[[], None] | None = None
) -> None:
    """Sets `full_tensor` on the sharded parameter of a unit, after `reset` has created it anew."""
    if reset:
        reset()
    each.sharded_param.full_tensor = MethodType(averaging, each.sharded_param)


def _averaging(placements: Sequence[Placement], divisor: float) -> Callable[..., Tensor]:
    def full_tensor(parameter: DTensor, *, grad_placements: Any = None) -> Tensor:
        averages = grad_placements is None and torch.is_grad_enabled() and parameter.requires_grad
        placed = placements if averages else grad_placements
        whole: Tensor = DTensor.full_tensor(parameter, grad_placements=placed)
        if averages:
            whole.register_hook(lambda gradient: gradient / divisor)
        return whole

    return full_tensor
