"""Ring attention in pieces, beside a softmax over all keys, in float64 on threads as ranks."""

import itertools
import math

import pytest
import torch
from torch import distributed

from planc.runtime.standalone import context_ring
from planc.runtime.standalone.context_fused import Fused
from planc.runtime.standalone.context_ring import Ring, RingAttention, RingMask, TileDropout
from planc.simulate.thread_ranks import run_ranks

RANKS, OWN = 4, 12
LENGTH = RANKS * OWN


def order(balance):
    """The tokens of all ranks, in the order in which the ranks have them."""
    if balance == "none":
        return torch.arange(LENGTH)
    runs = torch.arange(LENGTH).view(2 * RANKS, -1)
    return torch.cat([runs[[rank, 2 * RANKS - 1 - rank]].flatten() for rank in range(RANKS)])


def pairs(kind, balance):
    """Which pairs count, `[rows, 1, queries, keys]`, in the ranks' order."""
    at = order(balance)
    query, key = at[:, None], at[None, :]
    seen = (key <= query).expand(2, 1, LENGTH, LENGTH).clone()
    if kind == "window":
        seen &= query - key < 17
    if kind == "documents":
        seen &= (query // 20) == (key // 20)
    if kind == "padding":
        seen[1, :, :, at < 7] = False
    if kind == "both ways":
        seen = torch.ones_like(seen)
    return seen


def mask_of(seen, rank, ring, evenly=False):
    def made(q_offset, q_length, kv_offset, kv_length):
        return seen[..., q_offset : q_offset + q_length, kv_offset : kv_offset + kv_length]

    ring.rank, ring.size = rank, RANKS
    return RingMask(made, OWN, ring, evenly=evenly)


KINDS = ["causal", "window", "documents", "padding", "both ways"]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("balance", ["none", "head_tail"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [2, 5, 512])
def test_pieces_are_all_pairs_that_count(kind, balance, fused, tile, monkeypatch):
    monkeypatch.setattr(context_ring, "TILE", tile)
    seen = pairs(kind, balance)
    for rank in range(RANKS):
        mask = mask_of(seen, rank, object.__new__(Ring))
        found = torch.zeros_like(seen[:, :, :OWN], dtype=torch.long)
        for owner in range(RANKS):
            for piece in mask.pieces(owner, fused=fused):
                shape = [piece.queries.stop - piece.queries.start]
                shape += [piece.keys.stop - piece.keys.start]
                of = torch.ones(shape, dtype=torch.bool)
                of = of.tril() if piece.causal else of
                of = of if piece.mask is None else piece.mask
                start = owner * OWN
                keys = slice(start + piece.keys.start, start + piece.keys.stop)
                found[:, :, piece.queries, keys] += of.long()
        assert torch.equal(found, seen[:, :, rank * OWN :][:, :, :OWN].long())


def test_the_pieces_of_a_causal_mask_are_large():
    """With a run of each half, all of a rank's pairs with another are a few pieces."""
    seen = pairs("causal", "head_tail")
    mask = mask_of(seen, 1, object.__new__(Ring))
    sizes = {
        owner: [(p.queries.stop - p.queries.start, p.keys.stop - p.keys.start, p.causal)
                for p in mask.pieces(owner, fused=True)]
        for owner in range(RANKS)
    }  # fmt: skip
    assert sizes[0] == [(6, 6, False), (6, 6, False)]
    assert sizes[1] == [(12, 12, True)]
    assert sizes[2] == [(6, 6, False), (6, 6, False)]


def whole(given, seen, scale):
    """The attention to all keys, by a softmax of all scores."""
    query, key, value, sinks = given
    shared = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(shared, 1) for t in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        beside = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, beside], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :LENGTH]
    return (weights @ value).transpose(1, 2)


def tensors(sinks, width=8):
    torch.manual_seed(0)
    shapes = (2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, width)
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    made.append(torch.randn(4, dtype=torch.float64) if sinks else None)
    return [t if t is None else t.requires_grad_() for t in made]


def errors(kind, balance, *, sinks=False, width=8, cap=None):
    """The largest errors of the output and of the gradients of queries, keys, values, sinks."""
    given, seen, scale = tensors(sinks, width), pairs(kind, balance), 0.4
    right = whole(given, seen, scale)
    grad = torch.randn_like(right)
    some = [t for t in given if t is not None]
    wanted = [right.detach(), *torch.autograd.grad(right, some, grad)]
    found = {}

    def rank(number):
        ring = Ring(distributed.group.WORLD)
        mask = mask_of(seen, number, ring)
        at = slice(number * OWN, (number + 1) * OWN)
        own = [t.detach()[:, :, at].clone().requires_grad_() for t in given[:3]]
        own.append(None if given[3] is None else given[3].detach().clone().requires_grad_())
        dropout = TileDropout(0.0, torch.device("cpu"))
        output = RingAttention.apply(*own, mask, ring, dropout, scale, cap)
        of = [t for t in own if t is not None]
        found[number] = [output.detach(), *torch.autograd.grad(output, of, grad[:, at])]

    assert run_ranks(RANKS, rank, seconds=120) is None
    dims = [1, 2, 2, 2, None]
    made = [
        sum(parts) if dim is None else torch.cat(parts, dim)
        for dim, *parts in zip(dims, *(found[n] for n in range(RANKS)), strict=False)
    ]
    return [float((one - other).abs().max()) for one, other in zip(made, wanted, strict=True)]


@pytest.mark.parametrize("balance", ["none", "head_tail"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sinks", "width"), [(False, 8), (True, 8), (False, 5), (False, 24)])
def test_pieces_are_merged_exactly(kind, balance, sinks, width, monkeypatch):
    monkeypatch.setattr(context_ring, "TILE", 3)
    assert max(errors(kind, balance, sinks=sinks, width=width)) < 1e-12


def causal_as_all(monkeypatch):
    plain = Fused.__init__
    monkeypatch.setattr(
        Fused, "__init__", lambda own, *given: plain(own, *given[:3], False, given[4])
    )


def sums_of_the_block(monkeypatch):
    back = Fused.backward

    def own(self, grad, output, _):
        return back(self, grad, output, self.forward()[1])

    monkeypatch.setattr(Fused, "backward", own)


def output_of_the_block(monkeypatch):
    back = Fused.backward
    monkeypatch.setattr(
        Fused, "backward", lambda self, grad, _, sums: back(self, grad, self.forward()[0], sums)
    )


def heads_in_the_kernels_order(monkeypatch):
    """As if the first heads of queries shared the first head of keys."""
    plain = Fused.__init__

    def own(self, *given):
        plain(self, *given)
        self.shares = [slice(0, 2), slice(2, 4)]

    monkeypatch.setattr(Fused, "__init__", own)


@pytest.mark.parametrize(
    "fault", [causal_as_all, sums_of_the_block, output_of_the_block, heads_in_the_kernels_order]
)
def test_faults_of_pieces_show(fault, monkeypatch):
    fault(monkeypatch)
    assert max(errors("causal", "head_tail")) > 1e-2


def test_what_no_kernel_computes_comes_to_the_same():
    """A cap that is too large to bend a score takes the way without kernels."""
    capped, plain = (errors("padding", "head_tail", cap=cap) for cap in (1e9, None))
    assert max(*capped, *plain) < 1e-6 and not any(map(math.isnan, itertools.chain(capped)))
