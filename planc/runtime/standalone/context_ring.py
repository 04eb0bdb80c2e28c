"""Ring attention: keys and values are passed around the ranks, and queries stay.

A rank has its own keys and values and those of one other rank at a time. Pairs of
queries and keys are computed in pieces: what pieces find is merged by the largest score
and the sum of a softmax over all keys, and the backward pass computes the scores again.
Pieces whose pairs all count, or are causal, are as large as can be and computed by
fused kernels (`context_fused.py`); the others are tiles whose scores are there at once.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from planc.runtime.standalone.context_fused import Fused, is_fused
from planc.runtime.standalone.context_tokens import ContextError

TILE = 512
"""The queries of a tile, and its keys, at most."""
LEAST = torch.finfo(torch.float32).min
"""Added to the score of a key that a query does not see."""
UNKNOWN = ("block_indices", "sinks", "head_mask", "output_attentions")
"""Arguments that some models give their attention, and a ring does not support."""
OTHERS = "use `attention = all_gather`"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    mask: Any,
    ring: Any,
    given: Mapping[str, Any],
) -> Tensor:
    """Attention of this rank's queries to the keys of all.

    Args:
        module: calls the attention interface.
        inputs: queries, keys and values of this rank.
        mask: a `RingMask`, or a `ChosenMask`.
        ring: the ranks.
        given: the other arguments of the interface.

    Raises:
        ContextError: the module's attention does more.
    """
    name, sinks = type(module).__name__, given.get("s_aux")
    for word in UNKNOWN:
        if given.get(word) is not None and given[word] is not False:
            raise ContextError(f"{name} gives its attention `{word}`: {OTHERS}")
    if isinstance(sinks, DTensor):
        raise ContextError(f"{name} has sinks that are DTensors")
    scale, cap = given.get("scaling"), given.get("softcap")
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    rate = (given.get("dropout") or 0.0) if module.training else 0.0
    dropout = TileDropout(rate, inputs[0].device)
    out: Tensor = RingAttention.apply(*inputs, sinks, mask, ring, dropout, scale, cap)
    return out


class PassedOn:
    """A tensor on its way to the next rank, while that of the rank before comes."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        self.sent, self.received = tensor, torch.empty_like(tensor)
        rank, size = group.rank(), group.size()
        after, before = (rank + 1) % size, (rank - 1) % size
        op, where = distributed.P2POp, {"group": group}
        sends = op(distributed.isend, tensor, group_peer=after, **where)
        receives = op(distributed.irecv, self.received, group_peer=before, **where)
        self.works = distributed.batch_isend_irecv([sends, receives])

    def wait(self) -> Tensor:
        """Waits for the received block, and returns it."""
        for work in self.works:
            work.wait()
        return self.received


class Ring:
    """The ranks of a group, each of which sends to the next."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def rotate(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each rank, and its block: this rank's first, and all others on every rank."""
        for step in range(self.size):
            coming = PassedOn(block, self.group) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, block
            if coming is not None:
                block = coming.wait()

    def pass_on(self, gradient: Tensor) -> PassedOn:
        """Sends what ranks have given to a block on, at last to its owner."""
        return PassedOn(gradient, self.group)


class MaskUnread:
    """A mask that the model's code hands on, and must not read."""

    way_out = OTHERS

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ContextError(f"the model's code reads its mask: {self.way_out}")


class RingMask(MaskUnread):
    """The mask between this rank's queries and all keys; one tile of it exists at a
    time.

    Args:
        made: transformers' mask `[rows, 1, queries, keys]`, by offsets and lengths.
        length: the tokens of a rank.
        ring: the ranks.
        evenly: whether a query that sees no key gets the mean of all values, as where a
            mask is added to the scores; else zeros.
        read: whether the model has an indexer, whose code reads all of it.
    """

    def __init__(
        self,
        made: Callable[..., Tensor],
        length: int,
        ring: Ring,
        *,
        evenly: bool,
        read: bool = False,
    ) -> None:
        self.made, self.own, self.ring, self.evenly = made, length, ring, evenly
        self.read = read
        self.shape = length, length * ring.size
        self.found: dict[tuple[int, bool], list[tuple[slice, slice, str]]] = {}
        # where causal attention is balanced, a rank has a run of each half
        half = -(-length // 2)
        long = -(-half // -(-half // TILE))
        runs = ((0, half), (half, length))
        self.cuts = [
            slice(at, min(at + long, end))
            for start, end in runs
            for at in range(start, end, long)
        ]

    def __getitem__(self, index: Any) -> Any:
        return self.full_mask[index] if self.read else self.values

    @functools.cached_property
    def full_mask(self) -> Tensor:
        """The mask of this rank's queries and the keys of all, rank by rank."""
        keys = slice(0, self.own * self.ring.size)
        return self.tile(0, slice(0, self.own), keys)

    def tile(self, owner: int, queries: slice, keys: slice) -> Tensor:
        """The mask of this rank's queries and a rank's keys."""
        return self.made(
            q_offset=self.ring.rank * self.own + queries.start,
            q_length=queries.stop - queries.start,
            kv_offset=owner * self.own + keys.start,
            kv_length=keys.stop - keys.start,
        )

    @functools.cached_property
    def tile_visibility(self) -> dict[tuple[int, int, int], list[bool]]:
        """Whether some and whether all pairs of each tile count, and whether the tile
        is causal: the n-th query sees the first n keys.
        """
        facts, blind = {}, []
        for queries in self.cuts:
            see: Any = False
            for owner, keys in itertools.product(range(self.ring.size), self.cuts):
                mask = self.tile(owner, queries, keys)
                see = see | mask.any(-1)
                at = owner, queries.start, keys.start
                causal = torch.ones_like(mask).tril() == mask
                facts[at] = torch.stack([mask.any(), mask.all(), causal.all()])
            blind.append(~see.all())
        # the accelerator is waited for once
        *pairs, (lost, *_) = torch.stack(
            [*facts.values(), torch.stack(blind).any().expand(3)]
        ).tolist()
        keep_all = self.evenly and lost
        return {
            at: [any_visible or keep_all, *rest]
            for at, (any_visible, *rest) in zip(facts, pairs, strict=True)
        }

    def pieces(self, owner: int, *, fused: bool) -> Iterator["RingPiece"]:
        """The pairs of this rank's queries and a rank's keys that count, in disjoint
        pieces.

        Args:
            owner: the rank that the keys belong to.
            fused: whether pieces whose pairs all count, or are causal, may be larger
                than a tile, and causal ones come without a mask.
        """
        # all layers that have this mask ask, in both passes
        if (owner, fused) not in self.found:
            within = self._split_tiles(owner, self.cuts, self.cuts, fused)
            self.found[owner, fused] = list(within)
        for queries, keys, kind in self.found[owner, fused]:
            mask = self.tile(owner, queries, keys) if kind == "masked" else None
            causal = kind == "causal"
            yield RingPiece(owner, queries, keys, causal=causal, mask=mask)

    def _split_tiles(
        self, owner: int, rows: list[slice], columns: list[slice], fused: bool
    ) -> Iterator[tuple[slice, slice, str]]:
        queries = slice(rows[0].start, rows[-1].stop)
        keys = slice(columns[0].start, columns[-1].stop)
        visibility = [
            [
                self.tile_visibility[owner, row_tile.start, column_tile.start]
                for column_tile in columns
            ]
            for row_tile in rows
        ]
        tile = len(rows) == len(columns) == 1
        if not any(any_visible for row in visibility for any_visible, *_ in row):
            return
        if (fused or tile) and all(
            all_visible for row in visibility for _, all_visible, _ in row
        ):
            yield queries, keys, "all"
        elif fused and is_causal(visibility) and same_lengths(rows, columns):
            yield queries, keys, "causal"
        elif tile:
            yield queries, keys, "masked"
        else:
            for row_half, column_half in itertools.product(
                in_two(rows), in_two(columns)
            ):
                yield from self._split_tiles(owner, row_half, column_half, fused)


class ChosenMask:
    """A `RingMask` of those keys alone that an indexer chose.

    Args:
        mask: the `RingMask`.
        chosen: keys of all ranks, rank by rank, `[rows, queries, number]`.
    """

    def __init__(self, mask: Any, chosen: Tensor) -> None:
        self.mask, self.chosen, self.evenly = mask, chosen, mask.evenly

    def pieces(self, owner: int, **_: bool) -> Iterator["RingPiece"]:
        """The tiles of the mask, whose pairs no kernel knows."""
        for piece in self.mask.pieces(owner, fused=False):
            seen = self.among(piece.queries, piece.keys, owner * self.mask.own)
            mask = seen if piece.mask is None else seen & piece.mask
            yield RingPiece(owner, piece.queries, piece.keys, mask=mask)

    def among(self, queries: slice, keys: slice, first: int) -> Tensor:
        """The mask of the chosen keys of a rank; `first` is the number of its first
        key.
        """
        count = keys.stop - keys.start
        index = self.chosen[:, queries].long() - (first + keys.start)
        index = index.where((index >= 0) & (index < count), count)
        shape = (*index.shape[:2], count + 1)  # the last stands for all others
        mask = torch.zeros(shape, dtype=torch.bool, device=index.device)
        return mask.scatter_(-1, index, True)[:, None, :, :count]


class RingPiece:
    """Queries and keys of a rank, and which pairs count: all, the causal ones, or those
    of a mask `[rows, 1, queries, keys]`.
    """

    def __init__(
        self,
        owner: int,
        queries: slice,
        keys: slice,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> None:
        self.place = owner, queries.start, keys.start
        self.queries, self.keys, self.causal, self.mask = queries, keys, causal, mask


def in_two(cuts: list[slice]) -> list[list[slice]]:
    """Both halves of them; where causal attention is balanced, the runs of a rank."""
    half = -(-len(cuts) // 2)
    return [cuts[:half], cuts[half:]] if len(cuts) > 1 else [cuts]


def is_causal(visibility: list[list[list[bool]]]) -> bool:
    """Whether tiles are causal together: on the diagonal, all below and none above."""
    return len(visibility) == len(visibility[0]) and all(
        causal if at == to else all_visible if to < at else not any_visible
        for at, row in enumerate(visibility)
        for to, (any_visible, all_visible, causal) in enumerate(row)
    )


def same_lengths(rows: list[slice], columns: list[slice]) -> bool:
    """Whether a causal kernel's n-th query is the n-th of each tile too."""
    return [tile.stop - tile.start for tile in rows] == [
        tile.stop - tile.start for tile in columns
    ]


class TileDropout:
    """Drops weights of attention; the backward pass draws those of a tile again.

    Args:
        rate: the probability of a weight to be dropped.
        device: whose default generator draws a seed for all tiles, if any are dropped.
    """

    def __init__(self, rate: float, device: torch.device) -> None:
        self.rate, self.generator = rate, torch.Generator(device)
        self.seed = int(torch.randint(2**62, (), device=device)) if rate else 0

    def tile(self, *place: int) -> Callable[[Tensor], Tensor]:
        """Returns the dropout function of the tile of an owner, first query and first
        key.
        """

        def drop(weights: Tensor) -> Tensor:
            if not self.rate:
                return weights
            self.generator.manual_seed(hash((self.seed, *place)) % 2**63)
            drawn = torch.rand(
                weights.shape, generator=self.generator, device=weights.device
            )
            return weights * ((drawn >= self.rate) / (1 - self.rate))

        return drop


def matmul_in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """The product `[batch, n, m]`, in float32 at least, whatever its factors have."""
    kind = widest(left.dtype)
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cuda and left.dtype.itemsize == 2:
            return torch.bmm(left, right, out_dtype=kind)
        return torch.bmm(left.to(kind), right.to(kind))


def widest(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are summed: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class Scores:
    """The scores of a tile, `[rows, heads, queries, keys]`, in float32 at least.

    Args:
        query: `[rows, heads, queries, features]`.
        key: the same with the heads of keys and values, each of which several queries'
            heads share.
        mask: which pairs count, None for all.
        scale, cap: of the scores.
    """

    def __init__(
        self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float, cap: Any
    ) -> None:
        self.shape, self.groups, self.dtype = query.shape[:3], key.shape[1], query.dtype
        self.query = self.group_heads(query)
        values = self.ungroup_heads(
            matmul_in_fp32(self.query, key.flatten(0, 1).mT)
        ).mul_(scale)
        self.slope: Any = scale
        if cap is not None:
            bent = values.div_(cap).tanh_()
            values, self.slope = bent * cap, scale * (1 - bent * bent)
        self.values = values if mask is None else values.masked_fill_(~mask, LEAST)

    def group_heads(self, heads: Tensor) -> Tensor:
        """`[rows x heads of keys, heads that share one x queries, ...]`."""
        heads = heads.to(self.dtype).unflatten(1, (self.groups, -1))
        return heads.flatten(0, 1).flatten(1, 2)

    def ungroup_heads(self, joined: Tensor) -> Tensor:
        """`[rows, heads, queries, ...]` again."""
        return joined.view(*self.shape, -1)

    def weigh_values(self, weights: Tensor, value: Tensor, drop: Any = None) -> Tensor:
        """The sum of values, or keys, by their weights for each query."""
        weights = drop(weights) if drop else weights
        return self.ungroup_heads(
            matmul_in_fp32(self.group_heads(weights), value.flatten(0, 1))
        )

    def sum_over_queries(self, weights: Tensor, given: Tensor) -> Tensor:
        """The sum of the values of queries by their weights for each key."""
        sums = matmul_in_fp32(self.group_heads(weights).mT, given)
        return sums.unflatten(0, (-1, self.groups))


class RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention of this rank's queries to the keys of all ranks.

    `query`, `key` and `value` are `[rows, heads, tokens, features]`, `sinks` are scores
    of keys without a value, one for each head, or None. The output is
    `[rows, tokens, heads, features]`.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, sinks, mask, ring, *of_scores = given
        ctx.rest = mask, ring, PieceAttention(query, value, *of_scores)
        shape = (*query.shape[:3], value.shape[-1])
        output = query.new_zeros(shape, dtype=widest(query.dtype))
        total = torch.zeros_like(output[..., :1])
        top = torch.full_like(total, LEAST)
        for owner, block in ring.rotate(torch.cat([key, value], -1)):
            for piece in mask.pieces(owner, fused=ctx.rest[2].fused):
                of_keys = halves(block[:, :, piece.keys], key)
                attended = ctx.rest[2].attend(
                    piece, query[:, :, piece.queries], of_keys
                )
                merge(
                    *attended, *(t[:, :, piece.queries] for t in (top, total, output))
                )
        if sinks is not None:
            merge(
                by_head(sinks).expand_as(top).clone(), lambda _: 0, top, total, output
            )
        if not mask.evenly:
            total.masked_fill_(top == LEAST, torch.inf)
        result = (output / total).to(query.dtype).transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, sinks, result, top, total)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, output, top, total = ctx.saved_tensors
        mask, ring, computed = ctx.rest
        # the part of the gradients of scores that all keys of a query share
        shared = (grad.to(top.dtype) * output).sum(-1, keepdim=True).transpose(1, 2)
        both = grad.transpose(1, 2), output.transpose(1, 2)
        facts = query, *both, shared, top, total
        query_gradient = torch.zeros_like(query, dtype=top.dtype)
        local, coming = shared, None  # gradients of this rank's block, and of another's
        for owner, block in ring.rotate(torch.cat([key, value], -1)):
            given = torch.zeros_like(block, dtype=top.dtype)
            for piece in mask.pieces(owner, fused=computed.fused):
                slices = [t[:, :, piece.queries] for t in facts]
                of_keys = halves(block[:, :, piece.keys], key)
                of_queries, *others = computed.gradients(piece, slices, of_keys)
                query_gradient[:, :, piece.queries] += of_queries
                for part, other in zip(halves(given, key), others, strict=True):
                    part[:, :, piece.keys] += other
            if owner == ring.rank:
                local = given
            else:
                given += 0 if coming is None else coming.wait()
                coming = ring.pass_on(given)
        total_gradient = local if coming is None else local + coming.wait()
        lost = None
        if sinks is not None:
            weights = (by_head(sinks) - top).exp() / total
            lost = -(weights * shared).sum((0, 2, 3)).to(sinks.dtype).view_as(sinks)
        back = (
            query_gradient.to(query.dtype),
            *halves(total_gradient.to(key.dtype), key),
            lost,
        )
        return (*back, *[None] * 5)


class PieceAttention:
    """Computes the outputs of pieces, and their gradients.

    Args:
        query, value: as `RingAttention` has them.
        dropout: of weights.
        scale, cap: of the scores.
    """

    def __init__(
        self, query: Tensor, value: Tensor, dropout: TileDropout, scale: Any, cap: Any
    ) -> None:
        self.fused = is_fused(query, value, scale, cap, dropout.rate)
        self.dropout, self.scale, self.cap = dropout, scale, cap

    def attend(
        self, piece: RingPiece, query: Tensor, block: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scores of queries, and what these give by their weights, for `merge`."""
        if self.fused and piece.mask is None:
            gives, scores = Fused(query, *block, piece.causal, self.scale).forward()
            return scores.to(widest(query.dtype)), functools.partial(torch.mul, gives)
        tile = Scores(query, block[0], piece.mask, self.scale, self.cap)
        drop = self.dropout.tile(*piece.place)
        return tile.values, functools.partial(
            tile.weigh_values, value=block[1], drop=drop
        )

    def gradients(
        self, piece: RingPiece, facts: list[Tensor], block: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """The gradients of a piece's queries, its keys and its values."""
        query, grad, output, shared, top, total = facts
        if self.fused and piece.mask is None:
            part = Fused(query, *block, piece.causal, self.scale)
            return part.backward(grad, output, top + total.log())
        tile, value = (
            Scores(query, block[0], piece.mask, self.scale, self.cap),
            block[1],
        )
        drop = self.dropout.tile(*piece.place)
        weights, given = (
            tile.values.sub_(top).exp_().div_(total),
            tile.group_heads(grad),
        )
        changes = drop(
            tile.ungroup_heads(matmul_in_fp32(given, value.flatten(0, 1).mT))
        )
        slopes = changes.sub_(shared).mul_(weights).mul_(tile.slope)
        of_queries = tile.weigh_values(slopes, block[0])
        of_keys = tile.sum_over_queries(slopes, tile.query)
        return [of_queries, of_keys, tile.sum_over_queries(drop(weights), given)]


def merge(
    scores: Tensor,
    gives: Callable[[Tensor], Any],
    top: Tensor,
    total: Tensor,
    output: Tensor,
) -> None:
    """Adds keys to a softmax: its largest score, the sum of its weights beside that
    score's, and what these weights give.
    """
    highest = torch.maximum(top, scores.amax(-1, keepdim=True))
    weights, shrunk = scores.sub_(highest).exp_(), (top - highest).exp()
    total.mul_(shrunk).add_(weights.sum(-1, keepdim=True))
    output.mul_(shrunk).add_(gives(weights))
    top.copy_(highest)


def halves(block: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a block into the parts for keys and for values, in that order."""
    return block[..., : key.shape[-1]], block[..., key.shape[-1] :]


def by_head(sinks: Tensor) -> Tensor:
    return sinks.to(widest(sinks.dtype)).view(1, -1, 1, 1)
