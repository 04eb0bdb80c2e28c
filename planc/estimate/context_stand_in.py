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
    CONTEXT,
    RUNNING,
    ContextParallel,
    own_configs,
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
        self.plain = own_configs(model)
        for module in model.modules():
            module.__dict__[CONTEXT] = self

    def mask(self, q_length: int, kv_length: int, arguments: dict[str, Any]) -> Any:
        queries = q_length * (self.size if self.exchanges else 1)
        shape = (arguments["batch_size"], 1, queries, kv_length * self.size)
        eager = self.implementation(arguments["config"]) == "eager"
        return torch.ones(shape, dtype=arguments["dtype"] if eager else torch.bool)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        attention = self._own_attention(module)
        if not self.exchanges:
            both = torch.cat([torch.cat([key, value], -1)] * self.size, 2)
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
            output, seen = attention(module, query, key, value, mask, **kwargs)
            return output, seen
        query, key, value = (self._exchanged(t, 1, 2) for t in (query, key, value))
        output, _ = attention(module, query, key, value, mask, **kwargs)
        return self._exchanged(output, 1, 2), None

    def _exchanged(self, value: Tensor, source: int, target: int) -> Tensor:
        """As `HeadsForTokens`: dim `source` is divided by the ranks, `target` multiplied."""
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
