"""Weights in 4 bits in a run: made as `apply` goes, and filled from files of whole weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planc.ops.quantization import Quantize
from planc.runtime.sharded_tensors import Runs, plain


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
    from planc.runtime.standalone.quantization import quantize_filled

    make: Any = quantize_filled
    make(
        layer,
        op.kind,
        getattr(torch, op.storage),
        device,
        compute=op.compute and getattr(torch, op.compute),
        double=op.double,
        block=op.block,
    )


def packed(model: nn.Module) -> dict[str, nn.Module]:
    """The layers in 4 bits, by the plain names of their weights."""
    return {
        plain(f"{path}.weight"): module
        for path, module in model.named_modules()
        if hasattr(module, "packing")
    }


def source(layer: nn.Module) -> Source:
    found: Any = layer.source
    return Source(*found)


def pack(layer: nn.Module, weight: Tensor) -> None:
    """Fills a layer in 4 bits from this rank's part of its weight; no copy of that is kept.

    Args:
        layer: its bytes may be sharded by a unit; the scales are of all of `weight`.
        weight: what `source(layer).ranges` are, in its dtype.
    """
    own: Any = layer
    own.keep(weight)
