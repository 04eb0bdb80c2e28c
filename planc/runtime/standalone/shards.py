"""The slices of a tensor that a rank holds, and the full tensor from all slices."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from planc.compat.dtensor import (
    disable_redistribute_transform_optimization,
)
from planc.compat.fsdp import FSDPModule

Runs = tuple[tuple[int, int], ...]
"""The ranges [start, stop) of a dim of the full tensor that a rank holds."""
Block = tuple[tuple[slice, ...], tuple[slice, ...]]
"""(slices of a shard, slices of the full tensor)"""
Order = tuple[int, list[tuple[int, int]]]
"""(dim, ranges): a parameter's ranges of that dim, in the order that it has them."""
CHUNK_LIST = "__create_chunk_list__"
"""The attribute by which a local tensor says torch's checkpoints which chunk it is."""

# Names --------------------------------------------------------------------------------


WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str, wrappers: tuple[str, ...] = (*WRAPPERS, "base_layer")) -> str:
    """A name as the model had it before anything was wrapped."""
    return ".".join(part for part in name.split(".") if part not in wrappers)


def is_adapter(name: str) -> bool:
    """Whether a name is that of an adapter's tensor."""
    factors = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
    inside = (*factors, "lora_magnitude_vector")
    return any(part.endswith(inside) for part in name.split("."))


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(plain name, tensor) of each parameter and persistent buffer.

    A tied tensor is repeated for each of its names.
    """
    tensors: list[tuple[str, Tensor]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        kept = {**module._parameters, **module._buffers}
        for name, tensor in kept.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                tensors.append((plain_name(f"{path}.{name}" if path else name), tensor))
    return tensors


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each tensor, several if it is tied; in order of appearance."""
    names: dict[int, dict[str, None]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), {})[name] = None
    return [tuple(group) for group in names.values()]


def scalars_of(model: nn.Module) -> set[str]:
    """The plain names of parameters that are scalars in the model's own code.

    FSDP needs a dim, so a plan gives them one element; files have them without.
    """
    return {
        plain_name(f"{path}.{name}" if path else name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in getattr(module, "scalar_parameters", ())
    }


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with 4-bit weights, by the plain names of these weights."""
    return {
        plain_name(f"{path}.weight"): module
        for path, module in model.named_modules()
        if hasattr(module, "packing")
    }


# FSDP ---------------------------------------------------------------------------------


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit, outer before inner."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard_units(model: nn.Module) -> None:
    """Reshards all units: modules list shards, and nothing stays unsharded."""
    for unit in fsdp_units(model):
        unit.reshard()


def groups_of(unit: Any) -> list[Any]:
    """The parameter groups of an FSDP unit, which torch has no public name for."""
    return list(unit._get_fsdp_state()._fsdp_param_groups)


def on_host(model: nn.Module) -> set[int]:
    """The ids of the parameters whose shards are offloaded to the CPU."""
    units = fsdp_units(model)
    parameters = [p for unit in units for g in groups_of(unit) for p in g.fsdp_params]
    return {id(p.sharded_param) for p in parameters if p.offload_to_cpu}


# Order --------------------------------------------------------------------------------


def rank_orders(model: nn.Module) -> dict[str, Order]:
    """The storage orders that differ from the model's, by the plain name of parameters.

    A weight of several projections is stored rank by rank (`repack`), but files and
    full tensors have the model's order.
    """
    return {
        plain_name(f"{path}.{name}" if path else name): order
        for path, module in model.named_modules(remove_duplicate=False)
        for name, order in getattr(module, "_rank_order", {}).items()
    }


def in_own_order(full: Tensor, order: Order | None) -> Tensor:
    """A full tensor in the order of the ranks -> in the model's order."""
    if order is None:
        return full
    dim, ranges = order
    pieces = full.split([stop - start for start, stop in ranges], dim)
    first = [start for start, _ in ranges]
    places = sorted(range(len(first)), key=first.__getitem__)
    return torch.cat([pieces[i] for i in places], dim)


# Slices -------------------------------------------------------------------------------


def part_of(tensor: Tensor) -> Tensor:
    """The local shard of a tensor, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_part(parameter: Tensor) -> Tensor:
    """The local shard of a parameter's gradient; a partial one, as that of a norm, is
    summed over the ranks first.
    """
    gradient: Any = parameter.grad
    placements = parameter.placements if isinstance(parameter, DTensor) else None
    if isinstance(gradient, DTensor) and gradient.placements != placements:
        gradient = redistribute(gradient, placements)
    return part_of(gradient)


def redistribute(tensor: DTensor, placements: Any) -> DTensor:
    """A tensor with other placements, by one collective for each mesh dim.

    Torch would use one for several mesh dims if their flattened mesh existed, which
    needs another process group, and otherwise warns.
    """
    with disable_redistribute_transform_optimization():
        return tensor.redistribute(placements=placements)


def splits(placement: Placement) -> bool:
    """Whether a placement shards the tensor: `Shard`, or FSDP's `_StridedShard`."""
    return not placement.is_replicate() and not placement.is_partial()


def slices_of(tensor: Tensor, order: Order | None = None) -> tuple[Runs, ...]:
    """For each dim, the ranges of the full tensor that this rank holds.

    Shards may be uneven or empty, and those of packed projections have several ranges.

    Args:
        tensor: a DTensor, or a plain tensor.
        order: the order in which it is stored, if that is not the model's; the ranges
            are positions in the model's order.
    """
    if not isinstance(tensor, DTensor):
        return tuple(((0, size),) for size in tensor.shape)
    positions = chunk_positions(tensor)
    if positions is None:
        sizes = tuple(tensor.device_mesh.shape)
        at = tuple(tensor.device_mesh.get_coordinate())
        positions = positions_of(tuple(tensor.shape), sizes, at, tensor.placements)
        counts = tuple(len(p) for p in positions)
        here = tuple(part_of(tensor).shape)
        if counts != here and 0 not in (prod(counts), prod(here)):
            what = f"a shard of {tensor.placements} is {here}"
            raise RuntimeError(f"{what}, its ranges give {counts}")
    return model_ranges(positions, order)


def chunk_positions(tensor: Tensor) -> list[Tensor] | None:
    """The positions of a shard that says its chunk in the full tensor; None for others.

    Some libraries pack parameters into buffers that they split evenly, so shards of a
    parameter are uneven, and some empty. They record the chunk on the local tensor.
    """
    known = getattr(getattr(tensor, "_local_tensor", None), CHUNK_LIST, None)
    if known is None:
        return None
    [chunk] = known()
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    return [torch.arange(start, start + size) for start, size in ends]


def positions_of(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Sequence[Placement],
) -> list[Tensor]:
    """The positions in the full tensor that one rank holds, by dim.

    FSDP shards the local tensors of tensor parallelism, though its mesh dim comes
    first. It records that by a strided shard whose split factor is the number of inner
    shards; strided shards are split last.
    """
    positions = [torch.arange(size) for size in shape]
    late: list[tuple[int, Any]] = []
    for axis, placement in enumerate(placements):
        if not splits(placement):
            continue
        dim = placement.dim
        factor = getattr(placement, "split_factor", 1)
        after = zip(placements[axis + 1 :], sizes[axis + 1 :], strict=True)
        inside = prod(size for p, size in after if splits(p) and p.dim == dim)
        if factor > 1 and factor == inside:
            late.append((axis, Shard(dim)))
        else:
            bounds = (len(shape), sizes[axis], coordinate[axis])
            positions[dim] = chunk_of(placement, positions[dim], *bounds)
    for axis, last in reversed(late):
        bounds = (len(shape), sizes[axis], coordinate[axis])
        positions[last.dim] = chunk_of(last, positions[last.dim], *bounds)
    return positions


def chunk_of(
    placement: Placement, positions: Tensor, dims: int, count: int, index: int
) -> Tensor:
    """The chunk of some positions for one of `count` ranks."""
    shaped = positions.reshape([-1 if d == placement.dim else 1 for d in range(dims)])
    how = {"with_padding": False, "contiguous": False}
    pieces, _ = placement._split_tensor(shaped, count, **how)
    return pieces[index].flatten() if index < len(pieces) else positions[:0]


def model_ranges(positions: list[Tensor], order: Order | None) -> tuple[Runs, ...]:
    """Positions by dim, in the order in which ranks store a tensor, as ranges [start,
    stop) in the model's order.
    """
    if order is not None:
        dim, ranges = order
        model_positions = torch.cat(
            [torch.arange(start, stop) for start, stop in ranges]
        )
        positions[dim] = model_positions[positions[dim]]
    return tuple(ranges_of(p) for p in positions)


def ranges_of(positions: Tensor) -> Runs:
    """Positions as ranges [start, stop)."""
    if not len(positions):
        return ()
    ends = ((positions.diff() != 1).nonzero().flatten() + 1).tolist()
    pairs = zip([0, *ends], [*ends, len(positions)], strict=True)
    return tuple((int(positions[a]), int(positions[b - 1]) + 1) for a, b in pairs)


def select_ranges(full: Tensor, ranges: Sequence[Runs]) -> Tensor:
    """The concatenated ranges of a full tensor; a view if each dim has one range."""
    for dim, runs in enumerate(ranges):
        if runs != ((0, full.shape[dim]),):
            parts = [full.narrow(dim, start, stop - start) for start, stop in runs]
            parts = parts or [full.narrow(dim, 0, 0)]
            full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return full


def blocks_of(ranges: Sequence[Runs]) -> Iterator[Block]:
    """The blocks of a rank with these ranges."""
    placed: list[list[tuple[slice, slice]]] = []
    for runs in ranges:
        at = 0
        along: list[tuple[slice, slice]] = []
        for start, stop in runs:
            along.append((slice(at, at + stop - start), slice(start, stop)))
            at += stop - start
        placed.append(along)
    for block in product(*placed):
        yield tuple(inner for inner, _ in block), tuple(outer for _, outer in block)


def block_in(block: Block, window: Iterable[range]) -> Block | None:
    """The part of a block in a window of the full tensor, by dim; its positions in the
    full tensor are then those in the window. None if there is none.
    """
    inner: list[slice] = []
    outer: list[slice] = []
    for local, full, chosen in zip(*block, window, strict=True):
        first, step = chosen.start, chosen.step
        at = max(0, -(-(full.start - first) // step))
        end = min(len(chosen), -(-(full.stop - first) // step))
        if at >= end:
            return None
        start = local.start - full.start + first + at * step
        inner.append(slice(start, start + (end - at - 1) * step + 1, step))
        outer.append(slice(at, end))
    return tuple(inner), tuple(outer)


# Full tensors -------------------------------------------------------------------------


def has_wrong_offsets(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: Sequence[Placement]
) -> bool:
    """Whether torch would compute wrong offsets for the shards of a tensor.

    FSDP shards an uneven dim differently from its strided placement: for example 9 rows
    over tp = 2 and then over 4 ranks. And a strided shard without inner shards has
    several ranges, but torch expects one.
    """
    for axis, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", 1)
        if not splits(placement) or factor == 1:
            continue
        dim = placement.dim
        same = [
            (i, n)
            for i, (p, n) in enumerate(zip(placements, sizes, strict=True))
            if splits(p) and p.dim == dim
        ]
        inside = prod(n for i, n in same if i > axis)
        if factor != inside or shape[dim] % prod(n for _, n in same):
            return True
    return False


def irregular(tensor: Tensor, order: Order | None = None) -> bool:
    """Whether torch misplaces a shard of any rank in checkpoints and full tensors."""
    if not isinstance(tensor, DTensor):
        return order is not None
    if order is not None or chunk_positions(tensor) is not None:
        return True
    sizes = tuple(tensor.device_mesh.shape)
    return has_wrong_offsets(tuple(tensor.shape), sizes, tensor.placements)


def whole_of(
    tensor: Tensor, order: Order | None = None, *, scalar: bool = False
) -> Tensor:
    """The full tensor in the model's order, on every rank of its mesh.

    A collective if the tensor is sharded.

    Args:
        tensor: a DTensor, or a plain tensor.
        order: the order in which it is stored, if that is not the model's.
        scalar: whether it is a scalar in the model's own code (`scalars_of`).
    """
    if scalar:
        return whole_of(tensor, order).reshape(())
    if not isinstance(tensor, DTensor):
        return in_own_order(tensor.detach(), order)
    if irregular(tensor):
        return in_own_order(added_up(tensor), order)
    # an offloaded shard: its mesh has no backend for the CPU
    moved = tensor.detach().to(tensor.device_mesh.device_type)
    everywhere = [Replicate()] * tensor.device_mesh.ndim
    return in_own_order(redistribute(moved, everywhere).to_local(), order)


def added_up(tensor: DTensor) -> Tensor:
    """Sums the ranks' full tensors, zero outside their shards, as bytes: exact."""
    part = part_of(tensor).to(tensor.device_mesh.device_type)
    full = torch.zeros(tuple(tensor.shape), dtype=part.dtype, device=part.device)
    for inner, outer in blocks_of(slices_of(tensor)):
        full[outer] = part[inner]
    data = full.view(-1).view(torch.uint8)
    for axis, placement in enumerate(tensor.placements):
        if splits(placement):
            distributed.all_reduce(data, group=tensor.device_mesh.get_group(axis))
    return full


def full_state_dict(model: nn.Module, *, every_rank: bool = False) -> dict[str, Tensor]:
    """The full weights in the model's order, on the CPU; a collective.

    Args:
        model: sharded or not.
        every_rank: whether all ranks get them; otherwise rank 0 gets them and others
        an empty dict.

    Returns:
        Tensors by plain names; a tied tensor has each of its names. 4-bit weights are
        left out, because their bytes have no meaning without their scales.
    """
    reshard_units(model)
    orders, four = rank_orders(model), four_bit_layers(model)
    scalars = scalars_of(model)
    keep = every_rank or distributed.get_rank() == 0
    out: dict[str, Tensor] = {}
    done: dict[int, Tensor] = {}
    for path, tensor in model.state_dict(keep_vars=True).items():
        name = plain_name(path)
        if not isinstance(tensor, torch.Tensor) or name in four:
            continue
        if id(tensor) not in done:
            full = whole_of(tensor, orders.get(name), scalar=name in scalars)
            # a copy, because the next step changes a tensor that is not sharded
            done[id(tensor)] = full.to("cpu", copy=True) if keep else full.new_empty(0)
        if keep:
            out[name] = done[id(tensor)]
    return out
