"""Weights in 4 bits in a run: made as `apply` goes, and filled from files of whole weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planc.lowering.ops import Quantize
from planc.runtime.shards import Order, Runs, local, plain, runs, take

_SOURCE = "_planc_source"  # where a layer in 4 bits keeps what its weight was


@dataclass(frozen=True, slots=True)
class Source:
    """The weight that a layer in 4 bits is made of.

    Args:
        shape: of the whole.
        dtype: in which it is quantised.
        ranges: what of it this rank quantises: all, or its part along the tensor axis.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[Runs, ...]


def quantise(layer: nn.Module, op: Quantize, device: str) -> None:
    """Puts a linear layer's weight into 4 bits, before any unit shards it.

    Args:
        layer: its weight may be split over a tensor axis.
        op: says how.
        device: the type of device that the bytes go to.
    """
    from planc.runtime.fourbit import quantize

    order: Order | None = getattr(layer, "_rank_order", {}).get("weight")
    weight: Any = layer.weight
    source = Source(tuple(weight.shape), weight.dtype, runs(weight, order))
    make: Any = quantize
    make(
        layer,
        op.kind,
        getattr(torch, op.storage),
        device,
        compute=op.compute and getattr(torch, op.compute),
        double=op.double,
        block=op.block,
    )
    if order is not None:  # of the bytes there is none
        own: Any = layer
        own._rank_order = {n: o for n, o in own._rank_order.items() if n != "weight"}
    setattr(layer, _SOURCE, source)


def packed(model: nn.Module) -> dict[str, nn.Module]:
    """The layers in 4 bits, by the plain names of their weights."""
    return {
        plain(f"{path}.weight"): module
        for path, module in model.named_modules()
        if hasattr(module, _SOURCE)
    }


def source(layer: nn.Module) -> Source:
    found: Source = getattr(layer, _SOURCE)
    return found


def pack(layer: nn.Module, weight: Tensor, device: str) -> None:
    """Fills a layer in 4 bits from this rank's part of its weight; no copy of that is kept.

    Args:
        layer: its bytes may be sharded by a unit; the scales are of all of `weight`.
        weight: what `source(layer).ranges` are, in its dtype.
        device: the type of device that the scales go to.
    """
    from bitsandbytes.functional import quantize_4bit

    own: Any = layer
    column, own.quant_state = quantize_4bit(weight.to(device).contiguous(), **own.packing)
    local(own.weight).copy_(take(column, runs(own.weight)))
