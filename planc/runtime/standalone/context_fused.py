"""Attention to a block of keys by torch's fused kernels, as a part of a larger softmax.

A kernel returns what queries find in the block, and the logarithm of the sum of the
exponentials of their scores, by which blocks are merged. For the backward pass it is
given the output and that logarithm over the keys of all blocks: the gradients that it
returns are then the block's part of the whole ones (Dao et al., FlashAttention,
arXiv 2205.14135, section 3.1; Liu et al., Ring Attention, arXiv 2310.01889).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDEST = 256
"""The features of a head, at most, in FlashAttention for CUDA."""
ATEN = torch.ops.aten


def is_fused(query: Tensor, value: Tensor, scale: Any, cap: Any, rate: float) -> bool:
    """Whether a kernel computes this attention: scores are not capped, no weights are
    dropped, and on CUDA the numbers have 16 bits.
    """
    if cap is not None or rate or not isinstance(scale, int | float):
        return False
    wide = max(query.shape[-1], value.shape[-1]) > WIDEST
    on_cuda = query.is_cuda and query.dtype.itemsize == 2 and not wide
    return on_cuda or query.device.type == "cpu"


class Fused:
    """Attention of some queries to some keys.

    Args:
        query: `[rows, heads, queries, features]`.
        key, value: `[rows, heads of keys, keys, features]`; several heads of queries
            share one.
        causal: whether the n-th query sees the first n keys, else all.
        scale: of the scores.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> None:
        # the kernel has one width for keys and values, a multiple of eight
        self.width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
        self.given = [self.pad_heads(t) for t in (query, key, value)]
        self.causal, self.scale = causal, float(scale)
        self.of_query, self.of_value = query.shape[-1], value.shape[-1]
        # on CUDA the kernel knows heads that share keys
        shared = 1 if query.is_cuda else query.shape[1] // key.shape[1]
        self.shares = [slice(at, None, shared) for at in range(shared)]

    def pad_heads(self, heads: Tensor) -> Tensor:
        lacking = self.width - heads.shape[-1]
        return pad(heads, (0, lacking)) if lacking else heads

    def forward(self) -> tuple[Tensor, Tensor]:
        """The outputs of the queries, `[rows, heads, queries, features of values]`, and
        the logarithm of the sum of the exponentials of their scores, `[..., 1]`.
        """
        query, key, value = self.given
        first = [self._one(query[:, of], key, value) for of in self.shares]
        outputs, sums = (merge_head_groups(parts) for parts in zip(*first, strict=True))
        return outputs[..., : self.of_value], sums.unsqueeze(-1)

    def backward(self, grad: Tensor, output: Tensor, sums: Tensor) -> list[Tensor]:
        """The gradients of queries, keys and values.

        Args:
            grad, output: over all keys, `[rows, heads, queries, features of values]`.
            sums: the logarithm over all keys, `[rows, heads, queries, 1]`.
        """
        query, key, value = self.given
        grad, output = self.pad_heads(grad), self.pad_heads(output)
        parts = [
            self._one_back(
                grad[:, of],
                query[:, of],
                key,
                value,
                output[:, of],
                sums[:, of, :, 0].contiguous(),
            )
            for of in self.shares
        ]
        of_queries, *of_keys = zip(*parts, strict=True)
        gradients = (
            merge_head_groups(of_queries),
            *(sum(gradient[1:], gradient[0]) for gradient in of_keys),
        )
        widths = self.of_query, self.of_query, self.of_value
        return [
            gradient[..., :width]
            for gradient, width in zip(gradients, widths, strict=True)
        ]

    def _one(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        if given[0].is_cuda:
            output, sums, *_ = ATEN._scaled_dot_product_flash_attention(
                *given, 0.0, self.causal, False, scale=self.scale
            )
            return output, sums
        both: tuple[Tensor, Tensor] = ATEN._scaled_dot_product_flash_attention_for_cpu(
            *given, 0.0, self.causal, scale=self.scale
        )
        return both

    def _one_back(self, *given: Tensor) -> tuple[Tensor, ...]:
        back: tuple[Tensor, ...]
        if given[0].is_cuda:
            lengths = given[1].shape[2], given[2].shape[2]
            none = torch.empty(2, dtype=torch.uint64, device=given[0].device)
            back = ATEN._scaled_dot_product_flash_attention_backward(
                *given,
                *(None, None, *lengths, 0.0, self.causal, none, none[:0]),
                scale=self.scale,
            )
        else:
            back = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, 0.0, self.causal, scale=self.scale
            )
        return back


def merge_head_groups(parts: tuple[Tensor, ...]) -> Tensor:
    """Heads `0, n, 2n, ...`, `1, n + 1, ...` and so on in their order again."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1, 2)
