"""What only a GPU shows: attention in a ring, by fused kernels.

    python tests/gpu/attention.py

Prints JSON, of a rank of two and of four that has a run of each half of a causal sequence, in
bf16: milliseconds and the most memory of a forward and a backward pass in a ring by fused kernels,
in a ring by tiles, and of `scaled_dot_product_attention` with gathered keys and values and a mask;
and the largest relative errors of output and gradients, beside float32. One rank is there: blocks
of others are copies, and nothing is sent.
"""

import json
from unittest import mock

import torch
from losses import measured
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from planc.runtime.standalone import context_ring
from planc.runtime.standalone.context_ring import Ring, RingAttention, RingMask, TileDropout

ROWS, WIDTH = 1, 128
HEADS = 32, 8
"""Of queries, and of keys and values: llama 3 8B."""


class Alone(Ring):
    """The first rank, that is given every block."""

    def __init__(self, blocks):
        self.rank, self.size, self.blocks = 0, len(blocks), blocks

    def around(self, block):
        for step in range(self.size):
            owner = (self.rank - step) % self.size
            yield owner, block if step == 0 else self.blocks[owner]

    def pass_on(self, gradient):
        return Kept(torch.zeros_like(gradient))


class Kept:
    def __init__(self, value):
        self.value = value

    def wait(self) -> Tensor:
        return self.value


def case(ranks, own):
    """(queries of the first rank, keys and values of all, the tokens that they belong to)."""
    torch.manual_seed(0)
    length, kind = ranks * own, torch.bfloat16
    runs = torch.arange(length, device="cuda").view(2 * ranks, -1)
    at = torch.cat([runs[[r, 2 * ranks - 1 - r]].flatten() for r in range(ranks)])
    query = torch.randn(ROWS, HEADS[0], own, WIDTH, device="cuda", dtype=kind, requires_grad=True)
    both = [torch.randn(ROWS, HEADS[1], length, WIDTH, device="cuda", dtype=kind) for _ in range(2)]
    return query, both, at


def ring(query, both, at, *, fused=True):
    """A forward and a backward pass, with gradients of queries and of the rank's own block."""
    own = query.shape[2]

    def made(q_offset, q_length, kv_offset, kv_length):
        of = at[q_offset : q_offset + q_length, None], at[None, kv_offset : kv_offset + kv_length]
        return (of[1] <= of[0])[None, None]

    blocks = list(torch.cat(both, -1).split(own, 2))
    alone = Alone(blocks)
    mask = RingMask(made, own, alone, evenly=False)
    parts = [t[:, :, :own].clone().requires_grad_() for t in both]
    dropout = TileDropout(0.0, query.device)
    grad = torch.ones_like(query).transpose(1, 2)

    def step():
        with mock.patch.object(context_ring, "is_fused", lambda *_: fused):
            found = RingAttention.apply(
                query, *parts, None, mask, alone, dropout, WIDTH**-0.5, None
            )
        return found, *torch.autograd.grad(found, (query, *parts), grad)

    return step


def gathered(query, both, at):
    own = query.shape[2]
    mask = (at[None, :] <= at[:own, None])[None, None]
    whole = [t.clone().requires_grad_() for t in both]
    grad = torch.ones_like(query).transpose(1, 2)

    def step():
        # each head of queries has its own keys, as `repeat_kv` of transformers makes them
        every = [t.repeat_interleave(HEADS[0] // HEADS[1], 1) for t in whole]
        found = scaled_dot_product_attention(query, *every, attn_mask=mask)
        found = found.transpose(1, 2)
        back = torch.autograd.grad(found, (query, *whole), grad)
        return found, *back

    return step


def error(one, other):
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


def errors(ranks, own):
    """Of output, and gradients of queries, keys and values of the own block."""
    query, both, at = case(ranks, own)
    wide = query.detach().float().requires_grad_(), [t.float() for t in both]
    right = gathered(*wide, at)()
    right = [right[0], right[1], *(t[:, :, :own] for t in right[2:])]
    steps = {"ring": ring(query, both, at), "gathered": gathered(query, both, at)}
    return {
        name: [
            error(a[:, :, : b.shape[2]] if a.shape != b.shape else a, b)
            for a, b in zip(step(), right, strict=True)
        ]
        for name, step in steps.items()
    }


def main():
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for ranks, own in ((2, 4096), (2, 16384), (4, 8192)):
        query, both, at = case(ranks, own)
        ways = {
            "ring": ring(query, both, at),
            "ring, tiles": ring(query, both, at, fused=False),
            "gathered": gathered(query, both, at),
        }
        for name, step in ways.items():
            found[f"{ranks} ranks of {own}, {name}"] = measured(step)
    found["errors"] = errors(2, 2048)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
