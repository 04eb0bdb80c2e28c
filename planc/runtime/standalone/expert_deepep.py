"""Tokens to their experts and back by the kernels of DeepEP.

Written against its `ElasticBuffer` (DeepEP 2, README, "Interfaces and examples"): a
token goes once to each rank with some of its experts, and comes back as the sum of
what these make of it. The gradient of each way is the other one.
"""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from planc.runtime.standalone.expert_parallel import (
    LocalExperts,
    computed,
    dispatch_experts,
)

BUFFERS: dict[Any, Any] = {}
"""DeepEP's buffer of each group, which all layers use."""


class Way:
    """The way of some tokens to their experts, and back.

    Args:
        own: the experts of this rank.
        hidden: `[tokens, hidden]`, in bfloat16, on a GPU.
        chosen: experts of each token.
    """

    def __init__(self, own: LocalExperts, hidden: Tensor, chosen: int) -> None:
        from deep_ep import ElasticBuffer

        count = torch.tensor(len(hidden), device=hidden.device)
        distributed.all_reduce(count, distributed.ReduceOp.MAX, group=own.group)
        self.experts, self.most = own.count * own.group.size(), int(count)
        sizes = {"hidden": hidden.shape[1], "num_topk": chosen}
        least = ElasticBuffer.get_buffer_size_hint(own.group, self.most, **sizes)
        self.buffer: Any = BUFFERS.get(own.group)
        if self.buffer is None or self.buffer.num_bytes < least:
            sizes["num_max_tokens_per_rank"] = self.most
            self.buffer = BUFFERS[own.group] = ElasticBuffer(own.group, **sizes)
        self.handle: Any = None


class ToExperts(torch.autograd.Function):  # type: ignore[misc]
    """The rows that other ranks send, the experts of this rank that each has chosen, -1
    for none, and their weights.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, index: Tensor, weights: Tensor, way: Way
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.way = way
        rows, numbers, shares, way.handle, _ = way.buffer.dispatch(
            hidden,
            topk_idx=index,
            topk_weights=weights,
            num_experts=way.experts,
            num_max_tokens_per_rank=way.most,
        )
        ctx.mark_non_differentiable(numbers)
        return rows, numbers, shares

    @staticmethod
    def backward(ctx: Any, rows: Tensor, _: Any, shares: Tensor) -> Any:
        way = ctx.way
        hidden, weights, _ = way.buffer.combine(
            rows.contiguous(), handle=way.handle, topk_weights=shares.contiguous()
        )
        return hidden, None, weights, None


class FromExperts(torch.autograd.Function):  # type: ignore[misc]
    """The sums of what all ranks have made of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.buffer.combine(rows, handle=way.handle)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        way = ctx.way
        return way.buffer.dispatch(gradient.contiguous(), handle=way.handle)[0], None


def by_deepep(
    own: LocalExperts, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Sends each token to the ranks of its experts, and sums what they send back."""
    if hidden.dtype != torch.bfloat16:
        raise ValueError(f"DeepEP sends bfloat16, and hidden states are {hidden.dtype}")
    count, experts = len(hidden), own.count * own.group.size()
    index = index.masked_fill(index >= experts, -1)
    if not count:  # a token of no expert: a rank sends at least one
        hidden, weights = (
            one.new_zeros((1, one.shape[1])) for one in (hidden, weights)
        )
        index = index.new_full((1, index.shape[1]), -1)
    way = Way(own, hidden, index.shape[1])
    rows, numbers, shares = ToExperts.apply(
        hidden.contiguous(), index.contiguous(), weights.float().contiguous(), way
    )
    at, slot = torch.where(numbers >= 0)
    some = shares[at, slot].to(weights.dtype)
    out = computed(own.forward, rows[at], numbers[at, slot], some)
    total = torch.zeros_like(rows).index_add(0, at, out.to(rows.dtype))
    return FromExperts.apply(total, way)[:count]


def dispatch_by_deepep(module: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    """`dispatch_experts`, whose tokens are sent by DeepEP; it needs the package."""
    dispatch_experts(module, mesh, by_deepep, **settings)
