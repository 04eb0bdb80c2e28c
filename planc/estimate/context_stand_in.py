"""Attention of a part of each sequence without other ranks, for `kept_tensors`.

What would come from other ranks has its size and nothing else. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from planc.runtime.standalone.context import (
    RUNNING,
    ContextParallel,
    register,
)


class StandIn(ContextParallel):
    """
    Args:
        attention: `all_gather` or `ulysses`.
        size: how many parts a sequence has.
    """

    def __init__(self, model: nn.Module, attention: str, size: int) -> None:
        self.size, self.exchanges = size, attention == "ulysses"
        self.rank, self.balance, self.tokens = 0, "none", None
        self.prepare(model)

    def mask(self, q_length: int, kv_length: int, arguments: dict[str, Any]) -> Any:
        queries = q_length * (self.size if self.exchanges else 1)
        shape = (arguments["batch_size"], 1, queries, kv_length * self.size)
        eager = self.implementation(arguments["config"]) == "eager"
        return torch.ones(shape, dtype=arguments["dtype"] if eager else torch.bool)

    def gathered(self, part: Tensor) -> Tensor:
        return torch.cat([part] * self.size, 2)

    def exchanged(self, value: Tensor, source: int, target: int) -> Tensor:
        parts = value.unflatten(source, (self.size, -1)).movedim(source, target)
        return parts.contiguous().flatten(target, target + 1)


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
