"""Collectives by the names that torch has, and exchanges that have gradients.

Ranks exchange parts of sequences, and tokens with their experts. torch's former names
warn on every rank.
"""

from typing import Any

import torch
from torch import Tensor, distributed

Sizes = list[int]


def all_gather(
    gathered: Tensor, shard: Tensor, group: Any, async_op: bool = False
) -> Any:
    """Fills `gathered` with the tensors of all ranks, one after the other."""
    named = getattr(distributed, "all_gather_single", None)  # torch 2.13
    return (named or distributed.all_gather_into_tensor)(
        gathered, shard, group=group, async_op=async_op
    )


def reduce_scatter(shard: Tensor, addends: Tensor, group: Any) -> None:
    """Fills `shard` with this rank's part of the sum of `addends` over the ranks."""
    named = getattr(distributed, "reduce_scatter_single", None)  # torch 2.13
    (named or distributed.reduce_scatter_tensor)(shard, addends, group=group)


class GatherSequence(torch.autograd.Function):  # type: ignore[misc]
    """The parts of all ranks, one after the other along dim 2."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, size = group, group.size()
        gathered = part.new_empty((size * len(part), *part.shape[1:]))
        all_gather(gathered, part.contiguous(), group=group)
        return gathered.unflatten(0, (size, len(part))).movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size = ctx.group.size()
        addends = grad.unflatten(2, (size, -1)).movedim(2, 0).flatten(0, 1).contiguous()
        part = addends.new_empty((len(addends) // size, *addends.shape[1:]))
        reduce_scatter(part, addends, group=ctx.group)
        return part, None


class Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Rows to other ranks, as many to each as it says; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sizes, received: Sizes, group: Any
    ) -> Tensor:
        ctx.back = received, sent, group
        return exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(gradient, *ctx.back), None, None, None


def exchange_rows(rows: Tensor, sent: Sizes, received: Sizes, group: Any) -> Tensor:
    """The rows that other ranks have sent, by rank."""
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    distributed.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class Sending:
    """Rows that are on their way to other ranks, as many to each as it says, while this
    rank computes; their gradients are on the way back while it computes others.
    """

    def __init__(self, rows: Tensor, sent: Sizes, received: Sizes, group: Any) -> None:
        self.sizes, self.group = (sent, received), group
        self.work: Any = None
        self.kept: Tensor | None = None
        self.gradient: Tensor | None = None
        self.rows: Tensor | None = SendRows.apply(rows, self)

    def receive(self) -> Tensor:
        """The rows that other ranks have sent, by rank; once, as nothing is kept."""
        rows, self.rows = self.rows, None
        return ReceiveRows.apply(rows, self)

    def start(self, rows: Tensor, sent: Sizes, received: Sizes) -> Tensor:
        """Starts an all-to-all of rows; returns the buffer, which is filled after
        `end`.
        """
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        self.kept = rows.contiguous()  # until the other ranks have it
        self.work = distributed.all_to_all_single(
            out, self.kept, received, sent, group=self.group, async_op=True
        )
        return out

    def end(self) -> None:
        """Waits for what was started."""
        self.work.wait()
        self.work = self.kept = None


class SendRows(torch.autograd.Function):  # type: ignore[misc]
    """Begins to send rows; their gradients end here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sending: Sending) -> Tensor:
        ctx.sending = sending
        return sending.start(rows, *sending.sizes)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.sending.gradient = ctx.sending.gradient, None
        ctx.sending.end()
        return gradient, None


class ReceiveRows(torch.autograd.Function):  # type: ignore[misc]
    """Waits for rows; their gradients begin here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sending: Sending) -> Tensor:
        ctx.sending = sending
        sending.end()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sending = ctx.sending  # autograd takes no gradient of another shape from here
        sending.gradient = sending.start(gradient, *sending.sizes[::-1])
        return gradient, None


def swap_sharded_dim(value: Tensor, group: Any, source: int, target: int) -> Tensor:
    """Splits dim `source` over the ranks; concatenates their parts along `target`: from
    all heads of a part of the tokens to a part of the heads of all, or back.
    """
    each = [1] * group.size()
    parts = value.unflatten(source, (group.size(), -1)).movedim(source, 0)
    received = Exchange.apply(parts, each, each, group)
    return received.movedim(0, target).flatten(target, target + 1)
