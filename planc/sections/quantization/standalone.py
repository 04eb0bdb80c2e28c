"""Linear layers with frozen 4-bit weights, under tensor parallelism and FSDP."""

# mypy: allow-subclassing-any

from typing import Any

import torch
from bitsandbytes import matmul_4bit
from bitsandbytes.functional import quantize_4bit
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from planc.compat.dtensor import compute_local_shape_and_global_offset
from planc.runtime.standalone.shards import Runs, part_of, slices_of


class FourBit(nn.Linear):
    """A linear layer with a weight of packed bytes: one column of the storage dtype.

    FSDP shards and all-gathers the column like any weight. The scales of its blocks,
    `quant_state`, are not a parameter and are replicated.
    """

    compute: torch.dtype | None
    quant_state: Any
    packing: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        mesh, split = None, None
        if isinstance(x, DTensor):  # the layer has a tensor-parallel style
            mesh, (split,) = x.device_mesh, x.placements
            x = x.to_local(grad_placements=[split if split.is_shard() else Partial()])
        rows = split is not None and split.is_shard()  # rowwise: the output is partial
        bias = self.bias if mesh is None or self.bias is None else self.bias.to_local()
        own = x if self.compute is None else x.to(self.compute)
        added = None if bias is None or rows else bias.to(own.dtype)
        y = matmul_4bit(own, self.weight, self.quant_state, bias=added).to(x.dtype)
        if mesh is None:
            return y
        y = DTensor.from_local(y, mesh, [Partial() if rows else Shard(-1)])
        return y + self.bias if rows and bias is not None else y


def quantize(
    layer: Any,
    kind: str,
    storage: torch.dtype,
    device: str,
    *,
    compute: torch.dtype | None = None,
    double: bool = False,
    block: int = 64,
) -> None:
    """Quantizes a linear layer's weight, or its local shard, to 4 bits, in place.

    A layer on meta gets a packed weight on meta, and no scales yet.
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
    """A 4-bit linear layer that is loaded from files of unquantized weights.

    `source` is the shape and dtype of the unquantized weight, and the ranges of it that
    this rank quantizes: all, or its shard along the tensor axis.
    """

    source: tuple[tuple[int, ...], torch.dtype, tuple[Runs, ...]]
    home: str

    def keep(self, weight: Tensor) -> None:
        """Quantizes the rank's ranges of the weight, and stores its shard's rows."""
        weight = weight.to(self.home).contiguous()
        column, self.quant_state = quantize_4bit(weight, **self.packing)
        rows, start = len(column), 0
        if isinstance(self.weight, DTensor):  # sharded by FSDP only
            mesh, how = self.weight.device_mesh, self.weight.placements
            place = compute_local_shape_and_global_offset(column.shape, mesh, how)
            (rows, _), (start, _) = place
        part_of(self.weight).copy_(column[start : start + rows])


def quantize_filled(
    layer: Any, kind: str, storage: torch.dtype, device: str, **how: Any
) -> None:
    """`quantize` for a layer that is loaded from files afterwards."""
    weight = layer.weight
    order = layer.__dict__.get("_rank_order", {}).pop("weight", None)
    layer.source = tuple(weight.shape), weight.dtype, slices_of(weight, order)
    quantize(layer, kind, storage, device, **how)
    layer.__class__, layer.home = FilledFourBit, device
