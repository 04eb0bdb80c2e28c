"""Weights in 4 bits in a run: made as `apply` goes, and filled from files of whole weights."""

from __future__ import annotations

import torch
from torch import nn

from planc.ops.quantization import Quantize


def quantise(layer: nn.Module, op: Quantize, device: str) -> None:
    """Puts a linear layer's weight into 4 bits, before any unit shards it.

    Args:
        layer: its weight may be split over a tensor axis.
        op: says how.
        device: the type of device that the bytes go to.
    """
    from planc.runtime.standalone.quantization import quantize_filled

    quantize_filled(
        layer,
        op.kind,
        getattr(torch, op.storage),
        device,
        compute=op.compute and getattr(torch, op.compute),
        double=op.double,
        block=op.block,
    )
