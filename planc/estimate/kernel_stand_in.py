"""Stand-ins for the kernels of linear attention and state-space layers while a forward is counted.

transformers computes them in loops of small torch operators where `fla` or `mamba_ssm` is not
installed; whoever trains such a model has the kernels. A stand-in has their outputs and keeps what
they keep; its FLOPs are those of the chunked algorithm, at the pace of attention's kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock


class Kernel(NamedTuple):
    """What one call computes.

    Args:
        shape: of its output.
        heads, tokens, head_dim: of it.
        flops: of one token of one head; 0 for a kernel that memory bounds.
        kept: elements that it keeps beside its inputs.
    """

    shape: tuple[int, ...]
    heads: int
    tokens: int
    head_dim: int
    flops: float
    kept: int = 0


def _delta_rule(_query: Any, key: Any, value: Any, chunk: int = 64) -> Kernel:
    """`chunk_gated_delta_rule` and `chunk_kda` of fla: per chunk the products of keys with keys and
    queries, their triangular system with keys and values, and four with the state.
    """
    rows, tokens, heads, wide = value.shape
    narrow = key.shape[-1]
    flops = 6 * chunk * narrow + 4 * chunk * wide + 6 * narrow * wide
    kept = rows * tokens * heads * chunk
    return Kernel((rows, tokens, heads, wide), heads, tokens, wide, flops, kept)


def _chunk_scan(hidden: Any, _dt: Any, _a: Any, b: Any, _c: Any, chunk: int = 256) -> Kernel:
    """`mamba_chunk_scan_combined` of mamba_ssm."""
    rows, tokens, heads, wide = hidden.shape
    groups, state = b.shape[-2:]
    flops = 2 * chunk * wide + 4 * state * wide + 2 * chunk * state * groups / heads
    return Kernel((rows, tokens, heads, wide), heads, tokens, wide, flops, hidden.numel())


def _selective_scan(hidden: Any, *_others: Any, chunk: int = 0) -> Kernel:
    """`selective_scan_fn` of mamba_ssm."""
    rows, channels, tokens = hidden.shape
    return Kernel((rows, channels, tokens), channels, tokens, 1, 0.0, hidden.numel())


_KERNELS: dict[str, tuple[Callable[..., Kernel], int, bool]] = {
    "torch_chunk_gated_delta_rule": (_delta_rule, 3, True),
    "chunk_kimi_delta_attention": (_delta_rule, 3, True),
    "mamba2_chunk_scan": (_chunk_scan, 5, False),
    "mamba_selective_scan": (_selective_scan, 5, False),
}
"""By transformers' function in a modeling file: what it computes, of how many of its first
arguments, and whether it returns the last state too."""

Noted = Callable[[Kernel, int], AbstractContextManager[None]]
"""Notes a kernel and the bytes that it reads; its own operators run in the context."""


@contextmanager
def fused(model: Any, noted: Noted) -> Iterator[None]:
    """Replaces the functions in the modeling files of a model."""
    files = {type(module).__module__ for module in model.modules()}
    with ExitStack() as stack:
        for name in sorted(files):
            for function, (kernel, count, states) in _KERNELS.items():
                if hasattr(sys.modules[name], function):
                    made = _stand_in(kernel, count, states, noted)
                    stack.enter_context(mock.patch.object(sys.modules[name], function, made))
        yield


def _stand_in(kernel: Callable[..., Kernel], count: int, states: bool, noted: Noted) -> Any:
    import torch

    class Fused(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, made: Kernel, *inputs: Any) -> Any:
            kept = [inputs[0].new_empty(made.kept)] if made.kept else []
            ctx.save_for_backward(*inputs, *kept)
            return inputs[0].new_empty(made.shape)

    def run(*args: Any, **kwargs: Any) -> Any:
        size = kwargs.get("chunk_size")
        made = kernel(*args[:count], **({"chunk": size} if size else {}))
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in inputs)
        with noted(made, moved):
            out = Fused.apply(made, *inputs)
        return (out, None) if states else out

    return run
