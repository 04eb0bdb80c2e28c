"""Weights in fp8 by blocks, quantized where they are: a block may lie on several ranks.

The scale of a block is its largest absolute value over 448. Ranks compute the largest values of
their parts and take the maximum over the ranks that shard the tensor. Each then has the scales of
the full weight and quantizes its own part, so the bits are those of the quantized full weight.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, distributed

from planc.ir.patches import FP8, Patch, TransferSide, scale_name
from planc.runtime.standalone import shards
from planc.runtime.transfer_messages import in_hub_order

LARGEST = 448.0
"""The largest value of `float8_e4m3fn`."""
SMALLEST_SCALE = 1e-12
"""The scale of a block of zeros."""


class BlockQuantizer:
    """The quantized weights of one rank.

    Args:
        tensors: of the model on this rank, by name.
        sources: the training side, in which weights that are quantized have the dtype fp8.
        rank: of this process on that side.
        block: the rows and the columns that share a scale.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], sources: TransferSide, rank: int, block: int
    ) -> None:
        self.tensors, self.block = tensors, block
        self.grids: dict[str, tuple[int, ...]] = {}
        self.hubs: dict[str, list[str]] = {}
        self.patches: dict[str, list[tuple[str, Patch]]] = {}
        self.weight_of: dict[str, str] = {}
        for held in sources.held:
            patch = held.patch
            for index in held.indices:
                hub, name = patch.hub.format(*index), patch.key.format(*index)
                if held.scales:
                    self.grids[hub] = tuple(stop for _, stop in patch.box)
                elif held.dtype == FP8:
                    if hub not in self.hubs.setdefault(name, []):
                        self.hubs[name].append(hub)
                        self.weight_of[scale_name(hub)] = name
                    if rank in held.ranks:
                        self.patches.setdefault(name, []).append((hub, patch))
        self.known: dict[str, dict[str, Tensor]] = {}

    def makes(self, name: str) -> bool:
        """Whether a name is that of a quantized weight, or of scales, that this rank has."""
        return self.weight_of.get(name, name if name in self.hubs else "") in self.tensors

    def make(self, name: str, value: Callable[[str], Tensor]) -> Tensor:
        """A quantized weight or its scales; a collective of the ranks that hold the weight.

        Args:
            name: of the weight in the model, or of scales.
            value: this rank's shard of a weight.
        """
        weight = self.weight_of.get(name, name)
        scales = self._scales(weight, value)
        if name != weight:
            return scales[name]
        local = value(name).float()
        shard = torch.empty(local.shape, dtype=torch.float8_e4m3fn)
        for hub, patch in self.patches.get(name, ()):
            where = tuple(slice(*bounds) for bounds in patch.local)
            rows, columns = self._blocks(patch)
            spread = scales[scale_name(hub)][rows[:, None], columns]
            quantized = in_hub_order(local[where], patch) / spread
            in_hub_order(shard[where], patch).copy_(quantized.to(torch.float8_e4m3fn))
        return shard

    def _scales(self, name: str, value: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The scales of the tensors of the files that a weight consists of."""
        if name in self.known:
            return self.known[name]
        names = [scale_name(hub) for hub in self.hubs[name]]
        shapes = [self.grids[scale] for scale in names]
        sizes = [rows * columns for rows, columns in shapes]
        flat = torch.zeros(sum(sizes))
        views = zip(names, flat.split(sizes), shapes, strict=True)
        grids = {scale: part.view(shape) for scale, part, shape in views}
        local = value(name).float()
        for hub, patch in self.patches.get(name, ()):
            where = tuple(slice(*bounds) for bounds in patch.local)
            grid = grids[scale_name(hub)]
            part = in_hub_order(local[where], patch).abs()
            grid.copy_(torch.maximum(grid, self._largest(part, patch, grid.shape)))
        tensor = self.tensors[name]
        for axis, placement in enumerate(getattr(tensor, "placements", ())):
            if shards.splits(placement):
                group = tensor.device_mesh.get_group(axis)
                distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=group)
        flat.div_(LARGEST).clamp_(min=SMALLEST_SCALE)
        return self.known.setdefault(name, grids)

    def _blocks(self, patch: Patch) -> tuple[Tensor, Tensor]:
        """The numbers of the blocks of the rows and the columns of a patch."""
        rows, columns = (torch.arange(*bounds) // self.block for bounds in patch.box)
        return rows, columns

    def _largest(self, part: Tensor, patch: Patch, shape: Sequence[int]) -> Tensor:
        """The largest values of the blocks of a part, 0 for blocks outside of it."""
        rows, columns = self._blocks(patch)
        numbers = rows[:, None] * shape[1] + columns
        flat = torch.zeros(shape[0] * shape[1])
        flat.scatter_reduce_(0, numbers.flatten(), part.flatten(), "amax")
        return flat.view(*shape)
