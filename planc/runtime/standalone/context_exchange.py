"""Collectives of context parallelism, with their gradients.

Emitted scripts inline these definitions without their types.
"""

from typing import Any

import torch
from torch import Tensor, distributed


class GatherSequence(torch.autograd.Function):  # type: ignore[misc]
    """The parts of all ranks, one after the other along dim 2."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, size = group, group.size()
        every = part.new_empty((size * len(part), *part.shape[1:]))
        distributed.all_gather_into_tensor(every, part.contiguous(), group=group)
        return every.unflatten(0, (size, len(part))).movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size = ctx.group.size()
        every = grad.unflatten(2, (size, -1)).movedim(2, 0).flatten(0, 1).contiguous()
        part = every.new_empty((len(every) // size, *every.shape[1:]))
        distributed.reduce_scatter_tensor(part, every, group=ctx.group)
        return part, None


class HeadsForTokens(torch.autograd.Function):  # type: ignore[misc]
    """From all heads of a part of the tokens to a part of the heads of all, or back.

    `[rows, heads, tokens, features]` in both cases.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, group: Any, source: int, target: int
    ) -> Tensor:
        ctx.group, ctx.dims = group, (source, target)
        return swapped(value, group, source, target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        source, target = ctx.dims
        return swapped(grad, ctx.group, target, source), None, None, None


def swapped(value: Tensor, group: Any, source: int, target: int) -> Tensor:
    """Splits dim `source` over the ranks; concatenates their parts along `target`."""
    parts = value.unflatten(source, (group.size(), -1)).movedim(source, 0).contiguous()
    received = torch.empty_like(parts)
    distributed.all_to_all_single(
        received.flatten(0, 1), parts.flatten(0, 1), group=group
    )
    return received.movedim(0, target).flatten(target, target + 1)
