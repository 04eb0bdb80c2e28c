"""Where the pieces of a model are: names without wrappers, and which slices a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "base_layer")  # the last is peft's
_HALVES = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})
Runs = tuple[tuple[int, int], ...]
"""Along one dimension: the ranges [start, stop) of the whole that a rank holds, in its order."""


def plain(name: str) -> str:
    """A name as the model had it before anything was wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def adapter(name: str) -> bool:
    """Whether a tensor is a part of an adapter."""
    return not _HALVES.isdisjoint(name.split("."))


Order = tuple[int, list[tuple[int, int]]]
"""(dim, ranges): a parameter's ranges of that dim, in the order in which they lie in it."""


def orders(model: nn.Module) -> dict[str, Order]:
    """Parameters that are not in the model's own order, by plain name.

    A weight of several projections is held rank by rank (`planc.runtime.parts.repack`), while every
    file and every whole tensor that leaves the run has the order of the model.
    """
    return {
        plain(f"{path}.{name}" if path else name): order
        for path, module in model.named_modules(remove_duplicate=False)
        for name, order in getattr(module, "_rank_order", {}).items()
    }


def ordered(full: Tensor, order: Order | None) -> Tensor:
    """A whole tensor as it is held -> in the model's own order."""
    if order is None:
        return full
    dim, ranges = order
    pieces = full.split([stop - start for start, stop in ranges], dim)
    first = [start for start, _ in ranges]
    return torch.cat([pieces[i] for i in sorted(range(len(first)), key=first.__getitem__)], dim)


def units(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit, outer before inner."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def offloaded(model: nn.Module) -> set[int]:
    """The ids of the parameters whose shards a plan keeps in host memory."""
    every = (g for unit in units(model) for g in groups(unit))
    return {id(p.sharded_param) for g in every for p in g.fsdp_params if p.offload_to_cpu}


def groups(unit: FSDPModule) -> list[Any]:
    """A unit's groups of parameters, which torch keeps to itself."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.12 and later
        return list(state._fsdp_param_groups)
    return [g for g in (state._fsdp_param_group,) if g is not None]


def reshard(model: nn.Module) -> None:
    """Puts the shards back in place: a unit that keeps its parameters holds whole ones now."""
    for unit in units(model):
        unit.reshard()


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
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split(placement: Placement) -> bool:
    """Whether a placement splits its tensor: `Shard`, or FSDP's `_StridedShard`, no subclass."""
    return not placement.is_replicate() and not placement.is_partial()


def runs(tensor: Tensor, order: Order | None = None) -> tuple[Runs, ...]:
    """For each dimension, the ranges of the whole tensor that this rank holds.

    Shards may be uneven or empty, and those of packed projections lie in several ranges.

    Args:
        tensor: a shard, or what is not split.
        order: in which it is held, where that is not the model's own; the ranges are of the latter.
    """
    if not isinstance(tensor, DTensor):
        return tuple(((0, size),) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is part of every mesh of a plan
    sizes = tuple(tensor.device_mesh.shape)
    found = _positions(tuple(tensor.shape), sizes, tuple(coordinate), tensor.placements)
    counts = tuple(len(p) for p in found)
    here = tuple(local(tensor).shape)
    if counts != here and 0 not in (prod(counts), prod(here)):
        raise RuntimeError(f"a shard of {tensor.placements} is {here}, its ranges give {counts}")
    if order is not None:
        dim, ranges = order
        own = [position for start, stop in ranges for position in range(start, stop)]
        found[dim] = [own[position] for position in found[dim]]
    return tuple(_ranges(p) for p in found)


def _positions(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> list[list[int]]:
    """The positions in the whole that one rank holds, by dimension.

    FSDP splits what tensor parallelism left, though its mesh dimension comes first. It says so by a
    strided shard whose factor is the number of shards inside; those are split last.
    """
    found = [torch.arange(size) for size in shape]
    late: list[tuple[int, Shard]] = []
    for axis, placement in enumerate(placements):
        if not split(placement):
            continue
        dim: int = placement.dim
        factor = getattr(placement, "split_factor", 1)
        after = zip(placements[axis + 1 :], sizes[axis + 1 :], strict=True)
        inside = prod(size for p, size in after if split(p) and p.dim == dim)
        if factor > 1 and factor == inside:
            late.append((axis, Shard(dim)))
        else:
            found[dim] = _part(placement, found[dim], len(shape), sizes[axis], coordinate[axis])
    for axis, whole in reversed(late):
        found[whole.dim] = _part(whole, found[whole.dim], len(shape), sizes[axis], coordinate[axis])
    return [p.tolist() for p in found]


def _part(placement: Placement, positions: Tensor, dims: int, count: int, index: int) -> Tensor:
    shaped = positions.reshape([-1 if d == placement.dim else 1 for d in range(dims)])
    pieces, _ = placement._split_tensor(shaped, count, with_padding=False, contiguous=False)
    return pieces[index].flatten() if index < len(pieces) else positions[:0]


def _ranges(positions: list[int]) -> Runs:
    out: list[list[int]] = []
    for position in positions:
        if out and out[-1][1] == position:
            out[-1][1] = position + 1
        else:
            out.append([position, position + 1])
    return tuple((start, stop) for start, stop in out)


def irregular(tensor: Tensor, order: Order | None = None) -> bool:
    """Whether torch itself can be wrong on where the shards of a tensor are; same on every rank.

    A strided shard of parts that do not divide evenly is laid out by FSDP otherwise than its
    placement says: 9 rows over tp = 2 and then over 4 ranks, for one. Neither `full_tensor` nor a
    distributed checkpoint can be asked for it then, nor for one that is strided by itself, which
    lies in several ranges; and torch knows nothing of an order that is not the model's own.
    """
    if order is not None:
        return True
    if not isinstance(tensor, DTensor):
        return False
    return _irregular(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tensor.placements)


def _irregular(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> bool:
    for axis, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", 1)
        if not split(placement) or factor == 1:
            continue
        dim: int = placement.dim
        same = [
            (i, n)
            for i, (p, n) in enumerate(zip(placements, sizes, strict=True))
            if split(p) and p.dim == dim
        ]
        inside = prod(n for i, n in same if i > axis)
        if factor != inside or shape[dim] % prod(n for _, n in same):
            return True
    return False


def whole(tensor: Tensor, order: Order | None = None) -> Tensor:
    """The full tensor in the model's own order, on every rank of its mesh.

    A collective where the tensor is split.

    Args:
        tensor: a shard, or what is not split.
        order: in which it is held, where that is not the model's own.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return ordered(tensor, order)
    kind = tensor.device_mesh.device_type
    if tensor.device.type != kind:  # offloaded: its mesh has no backend for the CPU
        tensor = tensor.to(kind)
    if irregular(tensor):
        return ordered(_summed(tensor), order)
    everywhere = [Replicate()] * tensor.device_mesh.ndim
    return ordered(tensor.redistribute(placements=everywhere).to_local(), order)


def _summed(tensor: DTensor) -> Tensor:
    """Every rank puts its part into zeros, and their bytes are added: exact, -0.0 too."""
    part = local(tensor)
    full = torch.zeros(tuple(tensor.shape), dtype=part.dtype, device=part.device)
    for inner, outer in places(runs(tensor)):
        full[outer] = part[inner]
    data = full.view(-1).view(torch.uint8)
    for axis, placement in enumerate(tensor.placements):
        if split(placement):
            distributed.all_reduce(data, group=tensor.device_mesh.get_group(axis))
    return full


def take(full: Tensor, ranges: tuple[Runs, ...]) -> Tensor:
    """The ranges of a whole tensor, put side by side; a view of it where one each will do."""
    for dim, some in enumerate(ranges):
        if some != ((0, full.shape[dim]),):
            parts = [full.narrow(dim, start, stop - start) for start, stop in some]
            parts = parts or [full.narrow(dim, 0, 0)]
            full = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    return full


def places(ranges: tuple[Runs, ...]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """(slices of the shard, slices of the whole tensor) of each block that a rank holds."""
    for block in product(*map(_placed, ranges)):
        inner = tuple(slice(at, at + stop - start) for at, start, stop in block)
        yield inner, tuple(slice(start, stop) for _, start, stop in block)


def _placed(some: Runs) -> Iterator[tuple[int, int, int]]:
    """(where it goes, start, stop) of each range of one dimension."""
    at = 0
    for start, stop in some:
        yield at, start, stop
        at += stop - start
