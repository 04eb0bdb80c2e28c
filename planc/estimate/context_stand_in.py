"""Attention of a part of each sequence without other ranks, for `kept_tensors`.

What would come from other ranks has its size and nothing else. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from planc.runtime.standalone.context import RUNNING, ContextParallel, register
from planc.runtime.standalone.context_ring import Ring, RingMask


class StandIn(ContextParallel):
    """
    Args:
        attention: `all_gather`, `ring` or `ulysses`.
        size: how many parts a sequence has.
    """

    def __init__(self, model: nn.Module, attention: str, size: int) -> None:
        self.size, self.attention = size, attention
        self.exchanges = attention == "ulysses"
        self.ring = RingAlone(size) if attention == "ring" else None
        self.rank, self.balance, self.tokens = 0, "none", None
        self.prepare(model)

    def mask(self, q_length: int, kv_length: int, arguments: dict[str, Any]) -> Any:
        if self.ring is not None:
            return Halves(self.mask, q_length, self.ring, evenly=False)
        queries = q_length * (self.size if self.exchanges else 1)
        shape = (arguments["batch_size"], 1, queries, kv_length * self.size)
        eager = self.implementation(arguments["config"]) == "eager"
        return torch.ones(shape, dtype=arguments["dtype"] if eager else torch.bool)

    def gathered(self, part: Tensor) -> Tensor:
        return torch.cat([part] * self.size, 2)

    def exchanged(self, value: Tensor, source: int, target: int) -> Tensor:
        parts = value.unflatten(source, (self.size, -1)).movedim(source, target)
        return parts.contiguous().flatten(target, target + 1)


class RingAlone(Ring):
    """A rank that has its own keys and values in the place of all others."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def around(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        yield from ((rank, block.clone()) for rank in range(self.size))


class Halves(RingMask):
    """Of the keys of each rank half are computed, as where causal attention is balanced."""

    def tiles(self, _owner: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        yield slice(self.own), slice(-(-self.own // 2)), None


@contextmanager
def exchanging(model: nn.Module, exchange: tuple[str, int]) -> Iterator[None]:
    """Makes a model attend to the parts of other ranks; nothing where a rank has all."""
    if exchange[1] > 1:
        RUNNING.context = StandIn(model, *exchange)
        register()
    try:
        yield
    finally:
        RUNNING.context = None
