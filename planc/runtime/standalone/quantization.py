"""A linear layer whose frozen weight is in 4 bits, under tensor parallelism and FSDP.

The emitted Python carries what it needs of this file as it stands, so it imports torch and
bitsandbytes alone, and its lines are of the length that formatters give without being told.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

import torch
from bitsandbytes import matmul_4bit
from bitsandbytes.functional import quantize_4bit
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from planc.runtime.standalone.shards import blocks_of, part_of, slices_of


class FourBit(nn.Linear):
    """A linear layer with a weight of packed bytes, a column of the dtype of its storage.

    FSDP shards and gathers the column as it does any weight; the scales of its blocks,
    `quant_state`, are no parameter and stay whole on every rank.
    """

    def forward(self, x):
        mesh, split = None, None
        if isinstance(x, DTensor):  # a style of the tensor axis is around
            mesh, (split,) = x.device_mesh, x.placements
            x = x.to_local(grad_placements=[split if split.is_shard() else Partial()])
        rows = split is not None and split.is_shard()  # each rank gives a part of a sum
        bias = self.bias if mesh is None or self.bias is None else self.bias.to_local()
        own = x if self.compute is None else x.to(self.compute)
        added = None if bias is None or rows else bias.to(own.dtype)
        y = matmul_4bit(own, self.weight, self.quant_state, bias=added).to(x.dtype)
        if mesh is None:
            return y
        y = DTensor.from_local(y, mesh, [Partial() if rows else Shard(-1)])
        return y + self.bias if rows and bias is not None else y


def quantize(layer, kind, storage, device, *, compute=None, double=False, block=64):
    """Makes a linear layer one of 4 bits, in place; of a split weight, this rank's part.

    A layer on meta gets room for its bytes there, and no scales yet.
    """
    weight = layer.weight.detach()
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    layer.__class__ = FourBit
    layer.compute, layer.quant_state = compute, None
    layer.packing = {
        "quant_type": kind,
        "quant_storage": storage,
        "compress_statistics": double,
        "blocksize": block,
    }
    if weight.is_meta:
        rows = -(-weight.numel() // (2 * storage.itemsize))
        packed = torch.empty((rows, 1), dtype=storage, device="meta")
    else:
        whole = weight.to(device).contiguous()
        packed, layer.quant_state = quantize_4bit(whole, **layer.packing)
    layer.weight = nn.Parameter(packed, requires_grad=False)


class FilledFourBit(FourBit):
    """A linear layer of 4 bits that takes whole weights, as files hold them."""

    def pack(self, whole):
        """Quantises this rank's part; `whole` gives slices of the weight by indexing."""
        _, dtype, ranges = self.source
        sizes = [sum(stop - start for start, stop in some) for some in ranges]
        weight = torch.empty(sizes, dtype=dtype)
        for inner, outer in blocks_of(ranges):
            weight[inner] = whole[outer].to(dtype)
        self.keep(weight)

    def keep(self, weight):
        """Quantises this rank's part of the weight, and keeps the rows of its shard."""
        weight = weight.to(self.home).contiguous()
        column, self.quant_state = quantize_4bit(weight, **self.packing)
        rows, start = len(column), 0
        if isinstance(self.weight, DTensor):  # which FSDP alone has split
            mesh, how = self.weight.device_mesh, self.weight.placements
            place = compute_local_shape_and_global_offset(column.shape, mesh, how)
            (rows, _), (start, _) = place
        part_of(self.weight).copy_(column[start : start + rows])


def quantize_filled(layer, kind, storage, device, **how):
    """`quantize`, of a layer that is to be filled from files afterwards."""
    weight = layer.weight
    order = layer.__dict__.get("_rank_order", {}).pop("weight", None)
    layer.source = tuple(weight.shape), weight.dtype, slices_of(weight, order)
    quantize(layer, kind, storage, device, **how)
    layer.__class__, layer.home = FilledFourBit, device
