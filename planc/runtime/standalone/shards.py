"""Which slices of a tensor a rank holds, and the whole tensor from all ranks'.

The emitted Python carries what it needs of this text as it stands, and so reads and gathers what
`apply` does: hence no imports from planc, no types, and lines as formatters give them without
being told. `planc.runtime.sharded_tensors` says what each of these takes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="var-annotated"

from __future__ import annotations

from itertools import product
from math import prod

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard


def plain_name(name):
    """A name as the model had it before anything was wrapped."""
    wrappers = ("_checkpoint_wrapped_module", "_orig_mod", "base_layer")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def groups_of(unit):
    """A unit's groups of parameters, which torch keeps to itself."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.12 and later
        return list(state._fsdp_param_groups)
    return [g for g in (state._fsdp_param_group,) if g is not None]


def on_host(model):
    """The ids of the parameters whose shards are kept in host memory."""
    fsdp = [module for module in model.modules() if isinstance(module, FSDPModule)]
    every = [p for unit in fsdp for g in groups_of(unit) for p in g.fsdp_params]
    return {id(p.sharded_param) for p in every if p.offload_to_cpu}


def rank_orders(model):
    """(dim, ranges) of each parameter that is not held in the model's own order."""
    return {
        plain_name(f"{path}.{name}" if path else name): order
        for path, module in model.named_modules(remove_duplicate=False)
        for name, order in getattr(module, "_rank_order", {}).items()
    }


def in_own_order(full, order):
    """A whole tensor as it is held -> in the model's own order."""
    if order is None:
        return full
    dim, ranges = order
    pieces = full.split([stop - start for start, stop in ranges], dim)
    first = [start for start, _ in ranges]
    places = sorted(range(len(first)), key=first.__getitem__)
    return torch.cat([pieces[i] for i in places], dim)


# Slices ------------------------------------------------------------------------------------------


def part_of(tensor):
    """What this rank holds, to be written in place."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def splits(placement):
    """Whether a placement splits its tensor: Shard, or FSDP's strided one."""
    return not placement.is_replicate() and not placement.is_partial()


def slices_of(tensor, order=None):
    """For each dimension, the ranges of the whole tensor that this rank holds.

    They are in the model's own order, whatever the order that they are held in.
    """
    if not isinstance(tensor, DTensor):
        return tuple(((0, size),) for size in tensor.shape)
    sizes = tuple(tensor.device_mesh.shape)
    at = tuple(tensor.device_mesh.get_coordinate())
    found = positions_of(tuple(tensor.shape), sizes, at, tensor.placements)
    counts = tuple(len(p) for p in found)
    here = tuple(part_of(tensor).shape)
    if counts != here and 0 not in (prod(counts), prod(here)):
        told = f"a shard of {tensor.placements} is {here}"
        raise RuntimeError(f"{told}, its ranges give {counts}")
    if order is not None:
        dim, ranges = order
        own = [position for start, stop in ranges for position in range(start, stop)]
        found[dim] = [own[position] for position in found[dim]]
    return tuple(ranges_of(p) for p in found)


def positions_of(shape, sizes, coordinate, placements):
    """The positions in the whole that one rank holds, by dimension.

    FSDP splits what tensor parallelism left, though its mesh dimension comes first. It
    says so by a strided shard whose factor is the number of shards inside; those are
    split last.
    """
    found = [torch.arange(size) for size in shape]
    late = []
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
            own = (len(shape), sizes[axis], coordinate[axis])
            found[dim] = chunk_of(placement, found[dim], *own)
    for axis, last in reversed(late):
        own = (len(shape), sizes[axis], coordinate[axis])
        found[last.dim] = chunk_of(last, found[last.dim], *own)
    return [p.tolist() for p in found]


def chunk_of(placement, positions, dims, count, index):
    """Those of some positions that one of `count` ranks gets."""
    shaped = positions.reshape([-1 if d == placement.dim else 1 for d in range(dims)])
    how = {"with_padding": False, "contiguous": False}
    pieces, _ = placement._split_tensor(shaped, count, **how)
    return pieces[index].flatten() if index < len(pieces) else positions[:0]


def ranges_of(positions):
    """Positions as ranges [start, stop)."""
    out = []
    for position in positions:
        if out and out[-1][1] == position:
            out[-1][1] = position + 1
        else:
            out.append([position, position + 1])
    return tuple((start, stop) for start, stop in out)


def taken(full, ranges):
    """The ranges of a whole tensor, put side by side; a view where one each will do."""
    for dim, some in enumerate(ranges):
        if some != ((0, full.shape[dim]),):
            parts = [full.narrow(dim, start, stop - start) for start, stop in some]
            parts = parts or [full.narrow(dim, 0, 0)]
            full = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    return full


def blocks_of(ranges):
    """(slices of the shard, slices of the whole) of each block that a rank holds."""
    placed = []
    for some in ranges:
        at, along = 0, []
        for start, stop in some:
            along.append((slice(at, at + stop - start), slice(start, stop)))
            at += stop - start
        placed.append(along)
    for block in product(*placed):
        yield tuple(inner for inner, _ in block), tuple(outer for _, outer in block)


# Whole tensors -----------------------------------------------------------------------------------


def misplaced(shape, sizes, placements):
    """Whether torch itself can be wrong on where the shards of a tensor are."""
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


def irregular_one(tensor, order=None):
    """Whether a tensor lies otherwise than torch's own checkpoints take it to lie."""
    if order is not None:
        return True
    if not isinstance(tensor, DTensor):
        return False
    sizes = tuple(tensor.device_mesh.shape)
    return misplaced(tuple(tensor.shape), sizes, tensor.placements)


def whole_of(tensor, order=None):
    """The full tensor in the model's own order, on every rank of its mesh."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return in_own_order(tensor, order)
    kind = tensor.device_mesh.device_type
    if tensor.device.type != kind:  # offloaded: its mesh has no backend for the CPU
        tensor = tensor.to(kind)
    if irregular_one(tensor):
        return in_own_order(added_up(tensor), order)
    everywhere = [Replicate()] * tensor.device_mesh.ndim
    return in_own_order(tensor.redistribute(placements=everywhere).to_local(), order)


def added_up(tensor):
    """Every rank puts its part into zeros, and their bytes are added: exact."""
    part = part_of(tensor)
    full = torch.zeros(tuple(tensor.shape), dtype=part.dtype, device=part.device)
    for inner, outer in blocks_of(slices_of(tensor)):
        full[outer] = part[inner]
    data = full.view(-1).view(torch.uint8)
    for axis, placement in enumerate(tensor.placements):
        if splits(placement):
            distributed.all_reduce(data, group=tensor.device_mesh.get_group(axis))
    return full


def full_state_dict(model):
    """The whole weights in the model's order, on the CPU of rank 0; a collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    orders, out, done = rank_orders(model), {}, {}
    keep = distributed.get_rank() == 0
    for path, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            full = whole_of(tensor, orders.get(plain_name(path)))
            done[id(tensor)] = full.to("cpu", copy=True) if keep else None
        if keep:
            out[plain_name(path)] = done[id(tensor)]
    return out
