"""Where the pieces of a model are: names without wrappers, and which slices a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from planc.runtime.standalone import shards

_SLICES: Any = shards  # without types, as the scripts that carry it are
_CUT = "__create_chunk_list__"
_HALVES = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})
Runs = tuple[tuple[int, int], ...]
"""Along one dimension: the ranges [start, stop) of the whole that a rank holds, in its order."""


def plain(name: str) -> str:
    """A name as the model had it before anything was wrapped."""
    return str(_SLICES.plain_name(name))


def adapter(name: str) -> bool:
    """Whether a tensor is a part of an adapter."""
    return not _HALVES.isdisjoint(name.split("."))


Order = tuple[int, list[tuple[int, int]]]
"""(dim, ranges): a parameter's ranges of that dim, in the order in which they lie in it."""


def orders(model: nn.Module) -> dict[str, Order]:
    """Parameters that are not in the model's own order, by plain name.

    A weight of several projections is held rank by rank (`tensor_styles.repack`),
    while every file and every whole tensor that leaves the run has the order of the model.
    """
    return dict(_SLICES.rank_orders(model))


def ordered(full: Tensor, order: Order | None) -> Tensor:
    """A whole tensor as it is held -> in the model's own order."""
    full = _SLICES.in_own_order(full, order)
    return full


def units(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit, outer before inner."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def offloaded(model: nn.Module) -> set[int]:
    """The ids of the parameters whose shards a plan keeps in host memory."""
    return set(_SLICES.on_host(model))


def groups(unit: FSDPModule) -> list[Any]:
    """A unit's groups of parameters, which torch keeps to itself."""
    return list(_SLICES.groups_of(unit))


def reshard(model: nn.Module) -> None:
    """Puts the shards back in place: a unit that keeps its parameters holds whole ones now."""
    for unit in units(model):
        unit.reshard()
    owner = megatron_of(model)
    if owner is not None:
        owner._replace_param_with_distributed_if_needed()
        _measure(model)


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(plain name, module, its name there, tensor) of each parameter and persistent buffer.

    A tied tensor comes once for each of its names.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Tensor | None] = {**module._parameters}
        for name, buffer in module._buffers.items():
            if name not in module._non_persistent_buffers_set:
                own[name] = buffer
        for name, tensor in own.items():
            if tensor is not None:
                yield plain(f"{path}.{name}" if path else name), module, name, tensor


def held(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter and persistent buffer by its plain name, as this rank holds it."""
    return {name: tensor for name, _, _, tensor in owners(model)}


def aliases(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each tensor: one, or several where it is tied; in order of first appearance."""
    names: dict[int, list[str]] = {}
    for name, _, _, tensor in owners(model):
        if name not in names.setdefault(id(tensor), []):
            names[id(tensor)].append(name)
    return [tuple(group) for group in names.values()]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds, to be written in place."""
    tensor = _SLICES.part_of(tensor)
    return tensor


# Megatron-FSDP -----------------------------------------------------------------------------------


def megatron_of(model: nn.Module) -> Any:
    """The model that Megatron-FSDP has around this one, None for torch's FSDP."""
    return getattr(next(model.parameters(), None), "_megatron_fsdp_model", None)


def bare(tensor: Tensor) -> Tensor:
    """A tensor without its history, of which it stays known where Megatron-FSDP cut it."""
    return like(tensor.detach(), tensor)


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """The same tensor; where another one of its layout was cut, so was this."""
    known = getattr(getattr(other, "_local_tensor", None), _CUT, None)
    if known is not None and isinstance(tensor, DTensor) and tensor.shape == other.shape:
        setattr(tensor._local_tensor, _CUT, known)
    return tensor


def _measure(model: nn.Module) -> None:
    """Lets the package find out, once, where each shard was cut; every rank must call it."""
    from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

    for parameter in model.parameters():
        own = isinstance(parameter, DTensor) and any(map(split, parameter.placements))
        if own and not hasattr(parameter._local_tensor, _CUT):
            update_uneven_dtensor_chunk_metadata(parameter)


def _cut(tensor: Tensor) -> tuple[Runs, ...] | None:
    """The ranges of a shard of Megatron-FSDP, None for any other tensor.

    Its buffers are cut where they are full, so ranks have unlike parts of a parameter, and some
    none. The package keeps that at the local tensor, where torch's checkpoints look for it.
    """
    known = getattr(getattr(tensor, "_local_tensor", None), _CUT, None)
    if known is None:
        return None
    [chunk] = known()
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    return tuple(((start, start + size),) if size else () for start, size in ends)


def _added(tensor: DTensor) -> Tensor:
    """Every rank puts its part into zeros, and their bytes are added: exact."""
    part = local(tensor)
    full = torch.zeros(tuple(tensor.shape), dtype=part.dtype, device=part.device)
    for inner, outer in places(runs(tensor)):
        full[outer] = part[inner]
    data = full.view(-1).view(torch.uint8)
    for axis, placement in enumerate(tensor.placements):
        if split(placement):
            distributed.all_reduce(data, group=tensor.device_mesh.get_group(axis))
    return full


# Slices ------------------------------------------------------------------------------------------


def split(placement: Placement) -> bool:
    """Whether a placement splits its tensor: `Shard`, or FSDP's `_StridedShard`, no subclass."""
    return bool(_SLICES.splits(placement))


def runs(tensor: Tensor, order: Order | None = None) -> tuple[Runs, ...]:
    """For each dimension, the ranges of the whole tensor that this rank holds.

    Shards may be uneven or empty, and those of packed projections lie in several ranges.

    Args:
        tensor: a shard, or what is not split.
        order: in which it is held, where that is not the model's own; the ranges are of the latter.
    """
    cut = _cut(tensor)
    found: tuple[Runs, ...] = _SLICES.slices_of(tensor, order) if cut is None else cut
    return found


def irregular(tensor: Tensor, order: Order | None = None) -> bool:
    """Whether torch itself can be wrong on where the shards of a tensor are; same on every rank.

    A strided shard of parts that do not divide evenly is laid out by FSDP otherwise than its
    placement says: 9 rows over tp = 2 and then over 4 ranks, for one. Neither `full_tensor` nor a
    distributed checkpoint can be asked for it then, nor for one that is strided by itself, which
    lies in several ranges; and torch knows nothing of an order that is not the model's own.
    """
    return _cut(tensor) is not None or bool(_SLICES.irregular_one(tensor, order))


def whole(tensor: Tensor, order: Order | None = None) -> Tensor:
    """The full tensor in the model's own order, on every rank of its mesh.

    A collective where the tensor is split.

    Args:
        tensor: a shard, or what is not split.
        order: in which it is held, where that is not the model's own.
    """
    cut = isinstance(tensor, DTensor) and _cut(tensor) is not None
    full: Tensor = _added(tensor) if cut else _SLICES.whole_of(tensor, order)
    return full


def take(full: Tensor, ranges: tuple[Runs, ...]) -> Tensor:
    """The ranges of a whole tensor, put side by side; a view of it where one each will do."""
    full = _SLICES.taken(full, ranges)
    return full


def places(ranges: tuple[Runs, ...]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """(slices of the shard, slices of the whole tensor) of each block that a rank holds."""
    found: Iterator[Any] = _SLICES.blocks_of(ranges)
    return found
