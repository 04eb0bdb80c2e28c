"""Collectives by the names that torch has, and exchanges that have gradients.

Ranks exchange parts of sequences, and tokens with their experts. torch's former names
warn on every rank.
"""

from typing import Any

import torch
from torch import Tensor, distributed

Sizes = list[int]


def all_gather(every: Tensor, own: Tensor, group: Any, async_op: bool = False) -> Any:
    """Fills `every` with the tensors of all ranks, one after the other."""
    named = getattr(distributed, "all_gather_single", None)  # torch 2.13
    return (named or distributed.all_gather_into_tensor)(
        every, own, group=group, async_op=async_op
    )


def reduce_scatter(own: Tensor, every: Tensor, group: Any) -> None:
    """Fills `own` with this rank's part of the sum of `every` over the ranks."""
    named = getattr(distributed, "reduce_scatter_single", None)  # torch 2.13
    (named or distributed.reduce_scatter_tensor)(own, every, group=group)


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
