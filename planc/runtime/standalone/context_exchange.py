"""Collectives of context parallelism and of experts, with their gradients."""

from typing import Any

import torch
from torch import Tensor, distributed

from planc.runtime.standalone.collectives import all_gather, reduce_scatter

Sizes = list[int]


class GatherSequence(torch.autograd.Function):  # type: ignore[misc]
    """The parts of all ranks, one after the other along dim 2."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, size = group, group.size()
        every = part.new_empty((size * len(part), *part.shape[1:]))
        all_gather(every, part.contiguous(), group=group)
        return every.unflatten(0, (size, len(part))).movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size = ctx.group.size()
        every = grad.unflatten(2, (size, -1)).movedim(2, 0).flatten(0, 1).contiguous()
        part = every.new_empty((len(every) // size, *every.shape[1:]))
        reduce_scatter(part, every, group=ctx.group)
        return part, None


class Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Rows to other ranks, as many to each as it says; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sizes, received: Sizes, group: Any
    ) -> Tensor:
        ctx.back = received, sent, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(gradient, *ctx.back), None, None, None


def exchanged(rows: Tensor, sent: Sizes, received: Sizes, group: Any) -> Tensor:
    """The rows that other ranks have sent, by rank."""
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    distributed.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def swapped(value: Tensor, group: Any, source: int, target: int) -> Tensor:
    """Splits dim `source` over the ranks; concatenates their parts along `target`: from
    all heads of a part of the tokens to a part of the heads of all, or back.
    """
    each = [1] * group.size()
    parts = value.unflatten(source, (group.size(), -1)).movedim(source, 0)
    received = Exchange.apply(parts, each, each, group)
    return received.movedim(0, target).flatten(target, target + 1)
