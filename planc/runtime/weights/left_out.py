"""The frozen parameters that a checkpoint leaves out, and the checksums that take their place."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planc.diagnostics.diagnostic import Diagnostic
from planc.ops.lowered import Lowered
from planc.runtime.preconditions import problem
from planc.runtime.safeguards.checksums import MULTIPLIER
from planc.runtime.standalone import shards
from planc.runtime.standalone.load_weights import listed_names, on_other_stages

_KEY = "frozen."
_CHUNK = 1 << 20
"""The elements that are counted at once: they take eight bytes each."""


def frozen_by(model: nn.Module, lowered: Lowered) -> frozenset[str]:
    """The parameters that the plan freezes and that are frozen: not those that a script froze,
    which may have been trained before.
    """
    last = {
        name: (i, op.trainable)
        for i, op in enumerate(lowered.freezes)
        for name in op.modules.names()
    }
    adapted = bool(lowered.adapters)

    def trains(name: str) -> bool:
        parts = name.split(".")
        above = (".".join(parts[:i]) for i in range(len(parts)))
        decided = max((last[each] for each in above if each in last), default=None)
        return decided[1] if decided else not adapted or shards.is_adapter(name)

    return frozenset(
        name
        for name, tensor in shards.named_tensors(model)
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and not trains(name)
    )


def checksums(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """The checksums of whole parameters by their keys in a checkpoint, the same under any mesh.

    A collective. The bits of each element are multiplied by a number of its place in each dim,
    modulo 2 ** 64; ranks add up the sums of their shards.
    """
    tensors, orders = dict(shards.named_tensors(model)), shards.rank_orders(model)
    four = shards.four_bit_layers(model)
    together: dict[tuple[DeviceMesh | None, tuple[int, ...]], dict[str, Tensor]] = {}
    for group in shards.tied_names(model):
        if (name := group[0]) not in names or name in four:
            continue
        tensor = tensors[name]
        total = _sum(shards.part_of(tensor), shards.slices_of(tensor, orders.get(name)))
        place: tuple[DeviceMesh | None, tuple[int, ...]] = None, ()
        if isinstance(tensor, DTensor):
            total = total.to(tensor.device_mesh.device_type)
            split = (i for i, p in enumerate(tensor.placements) if shards.splits(p))
            place = tensor.device_mesh, tuple(split)
        together.setdefault(place, {})[name] = total
    out: dict[str, Tensor] = {}
    for (mesh, axes), totals in together.items():
        stacked = torch.stack([*totals.values()])
        for axis in axes:
            assert mesh is not None  # whole tensors have no axes
            distributed.all_reduce(stacked, group=mesh.get_group(axis))
        out |= {_KEY + n: total for n, total in zip(totals, stacked.cpu(), strict=True)}
    return out


def _sum(part: Tensor, ranges: tuple[shards.Runs, ...]) -> Tensor:
    """The checksum of a shard, as a scalar of int64 on its device."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if not part.numel():
        return total
    bits = part.contiguous().view(kinds[part.element_size()])
    factors = []
    for dim, runs in enumerate(ranges):
        places = torch.cat([torch.arange(*run, device=part.device) for run in runs])
        factors.append(places * (MULTIPLIER * (2 * dim + 1) % 2**63) | 1)
    if not factors:
        return total + bits.to(torch.int64)
    rows = max(1, _CHUNK // bits[0].numel())
    for chunk, first in zip(bits.split(rows), factors[0].split(rows), strict=True):
        wide = chunk.to(torch.int64)
        for factor in reversed(factors[1:]):
            wide = (wide * factor).sum(-1)
        total = total + (wide * first).sum()
    return total


def names_in(metadata: Mapping[str, Any]) -> set[str]:
    """The parameters that a checkpoint leaves out."""
    return {key.removeprefix(_KEY) for key in metadata if key.startswith(_KEY)}


def differences(model: nn.Module, folder: Path, metadata: Mapping[str, Any]) -> list[Diagnostic]:
    """PL467 where a model has no values, or others, for what a checkpoint leaves out; a collective.

    Every rank has the same metadata.
    """
    tensors, names = dict(shards.named_tensors(model)), names_in(metadata)
    others, four = on_other_stages(model), shards.four_bit_layers(model)
    help = "call `run.load` with the folder of the base model first, and then with the checkpoint"
    if strange := names - tensors.keys() - others:
        text = f"{folder} was saved with frozen weights that this model lacks"
        return [problem("PL467", f"{text}: {listed_names(sorted(strange))}", help=help)]
    frozen_names = [n for n in tensors if n in names and n not in four]
    if empty := [n for n in frozen_names if tensors[n].is_meta]:
        text = f"{folder} leaves out the frozen weights, and the model has no values for"
        return [problem("PL467", f"{text} {listed_names(empty)}", help=help)]
    now = checksums(model, frozen_names)
    then = {key: torch.zeros((), dtype=torch.int64) for key in now}
    checkpoint.load(then, checkpoint_id=folder, no_dist=True)
    if other := [key.removeprefix(_KEY) for key in now if now[key] != then[key]]:
        text = f"{folder} was trained on another base model: other values, or another dtype, in"
        help = "load the base model that the run began with, in its dtype"
        return [problem("PL467", f"{text} {listed_names(other)}", help=help)]
    return []
