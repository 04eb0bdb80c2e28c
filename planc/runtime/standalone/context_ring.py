"""Ring attention: keys and values go around the ranks, and queries stay.

A rank has its own keys and values and those of one other rank at a time. Pairs of
queries and keys are computed in tiles: what tiles find is merged by the largest score
and the sum of a softmax over all keys, and the backward pass computes the scores again.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from planc.runtime.standalone.context_tokens import ContextError

TILE = 512
"""The queries of a tile, and its keys, at most."""
LEAST = torch.finfo(torch.float32).min
"""Added to the score of a key that a query does not see."""
UNKNOWN = ("indices", "block_indices", "sinks", "head_mask", "output_attentions")
"""What some models give their attention, and a ring does not know."""
OTHERS = "use `attention = all_gather`"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(
    module: nn.Module,
    own: tuple[Tensor, ...],
    mask: Any,
    ring: Any,
    given: Mapping[str, Any],
) -> Tensor:
    """Attention of this rank's queries to the keys of all.

    Args:
        module: calls the attention interface.
        own: queries, keys and values of this rank.
        mask: a `RingMask`.
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
    scale = own[0].shape[-1] ** -0.5 if scale is None else scale
    rate = (given.get("dropout") or 0.0) if module.training else 0.0
    dropout = TileDropout(rate, own[0].device)
    found: Tensor = RingAttention.apply(*own, sinks, mask, ring, dropout, scale, cap)
    return found


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
        """What came."""
        for work in self.works:
            work.wait()
        return self.received


class Ring:
    """The ranks of a group, each of which sends to the next."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def around(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each rank, and its block: this rank's first, and all others on every rank."""
        for step in range(self.size):
            coming = PassedOn(block, self.group) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, block
            if coming is not None:
                block = coming.wait()

    def pass_on(self, gradient: Tensor) -> PassedOn:
        """Sends what ranks have given to a block on, at last to its owner."""
        return PassedOn(gradient, self.group)


class RingMask:
    """Which keys this rank's queries see; one tile of it exists at a time.

    Args:
        made: transformers' mask `[rows, 1, queries, keys]`, by offsets and lengths.
        own: the tokens of a rank.
        ring: the ranks.
        evenly: whether a query that sees no key gets the mean of all values, as where a
            mask is added to the scores; else zeros.
    """

    def __init__(
        self, made: Callable[..., Tensor], own: int, ring: Ring, *, evenly: bool
    ) -> None:
        self.made, self.own, self.ring, self.evenly = made, own, ring, evenly
        self.shape = own, own * ring.size
        # where causal attention is balanced, a rank has a run of each half
        long = -(-own // (2 * -(-own // (2 * TILE))))
        self.cuts = [slice(at, min(at + long, own)) for at in range(0, own, long)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ContextError(f"the model's code reads its mask: {OTHERS}")

    def __getitem__(self, _index: Any) -> Any:
        return self.values

    def tile(self, owner: int, queries: slice, keys: slice) -> Tensor:
        """The mask of this rank's queries and a rank's keys."""
        return self.made(
            q_offset=self.ring.rank * self.own + queries.start,
            q_length=queries.stop - queries.start,
            kv_offset=owner * self.own + keys.start,
            kv_length=keys.stop - keys.start,
        )

    @functools.cached_property
    def seen(self) -> dict[tuple[int, int, int], list[bool]]:
        """Of each tile, whether some and whether all of its pairs count."""
        facts, blind = {}, []
        for queries in self.cuts:
            see: Any = False
            for owner, keys in itertools.product(range(self.ring.size), self.cuts):
                mask = self.tile(owner, queries, keys)
                see = see | mask.any(-1)
                at = owner, queries.start, keys.start
                facts[at] = torch.stack([mask.any(), mask.all()])
            blind.append(~see.all())
        # the accelerator is waited for once
        *pairs, (lost, _) = torch.stack(
            [*facts.values(), torch.stack(blind).any().expand(2)]
        ).tolist()
        every = self.evenly and lost
        return {
            at: [some or every, all_]
            for at, (some, all_) in zip(facts, pairs, strict=True)
        }

    def tiles(self, owner: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Queries, keys of a rank, and their mask where not all are seen; without tiles
        of which no query sees a key.
        """
        for queries, keys in itertools.product(self.cuts, self.cuts):
            some, all_ = self.seen[owner, queries.start, keys.start]
            if some:
                yield queries, keys, None if all_ else self.tile(owner, queries, keys)


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
        """What drops the weights of the tile of an owner, first query and first key."""

        def drop(weights: Tensor) -> Tensor:
            if not self.rate:
                return weights
            self.generator.manual_seed(hash((self.seed, *place)) % 2**63)
            drawn = torch.rand(
                weights.shape, generator=self.generator, device=weights.device
            )
            return weights * ((drawn >= self.rate) / (1 - self.rate))

        return drop


def multiplied(one: Tensor, two: Tensor) -> Tensor:
    """The product `[batch, n, m]` in float32, whatever the dtype of its factors."""
    with torch.autocast(one.device.type, enabled=False):
        if one.is_cuda and one.dtype.itemsize == 2:
            return torch.bmm(one, two, out_dtype=torch.float32)
        return torch.bmm(one.float(), two.float())


class Scores:
    """The scores of a tile, `[rows, heads, queries, keys]` in float32.

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
        self.query = self.joined(query)
        found = self.apart(multiplied(self.query, key.flatten(0, 1).mT)).mul_(scale)
        self.slope: Any = scale
        if cap is not None:
            bent = found.div_(cap).tanh_()
            found, self.slope = bent * cap, scale * (1 - bent * bent)
        self.values = found if mask is None else found.masked_fill_(~mask, LEAST)

    def joined(self, heads: Tensor) -> Tensor:
        """`[rows x heads of keys, heads that share one x queries, ...]`."""
        heads = heads.to(self.dtype).unflatten(1, (self.groups, -1))
        return heads.flatten(0, 1).flatten(1, 2)

    def apart(self, joined: Tensor) -> Tensor:
        """`[rows, heads, queries, ...]` again."""
        return joined.view(*self.shape, -1)

    def averaged(self, weights: Tensor, value: Tensor, drop: Any = None) -> Tensor:
        """The sum of values, or keys, by their weights for each query."""
        weights = drop(weights) if drop else weights
        return self.apart(multiplied(self.joined(weights), value.flatten(0, 1)))

    def summed(self, weights: Tensor, given: Tensor) -> Tensor:
        """The sum of what queries give, `joined`, by their weights for each key."""
        found = multiplied(self.joined(weights).mT, given)
        return found.unflatten(0, (-1, self.groups))


class RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention of this rank's queries to the keys of all ranks.

    `query`, `key` and `value` are `[rows, heads, tokens, features]`, `sinks` are scores
    of keys without a value, one for each head, or None. The output is
    `[rows, tokens, heads, features]`.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, sinks, *ctx.rest = given
        mask, ring, dropout, *of_scores = ctx.rest
        shape = (*query.shape[:3], value.shape[-1])
        output = query.new_zeros(shape, dtype=torch.float32)
        total = torch.zeros_like(output[..., :1])
        top = torch.full_like(total, LEAST)
        for owner, block in ring.around(torch.cat([key, value], -1)):
            keys_of, values_of = halves(block, key)
            for queries, keys, seen in mask.tiles(owner):
                tile = Scores(
                    query[:, :, queries], keys_of[:, :, keys], seen, *of_scores
                )
                drop = dropout.tile(owner, queries.start, keys.start)
                gives = functools.partial(
                    tile.averaged, value=values_of[:, :, keys], drop=drop
                )
                merge(
                    tile.values,
                    gives,
                    *(t[:, :, queries] for t in (top, total, output)),
                )
        if sinks is not None:
            merge(
                by_head(sinks).expand_as(top).clone(), lambda _: 0, top, total, output
            )
        if not mask.evenly:
            total.masked_fill_(top == LEAST, torch.inf)
        found = (output / total).to(query.dtype).transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, sinks, found, top, total)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, output, top, total = ctx.saved_tensors
        mask, ring, dropout, *of_scores = ctx.rest
        # the part of the gradients of scores that all keys of a query share
        shared = (grad.float() * output).sum(-1, keepdim=True).transpose(1, 2)
        facts = query, grad.transpose(1, 2), shared, top, total
        found = torch.zeros_like(query, dtype=torch.float32)
        own, coming = shared, None  # gradients of this rank's block, and of another's
        for owner, block in ring.around(torch.cat([key, value], -1)):
            given = torch.zeros_like(block, dtype=torch.float32)
            for queries, keys, seen in mask.tiles(owner):
                some, of_keys = [t[:, :, queries] for t in facts], block[:, :, keys]
                drop = dropout.tile(owner, queries.start, keys.start)
                one, other = gradients(
                    some, halves(of_keys, key), seen, drop, of_scores
                )
                found[:, :, queries] += one
                given[:, :, keys] += other
            if owner == ring.rank:
                own = given
            else:
                given += 0 if coming is None else coming.wait()
                coming = ring.pass_on(given)
        both = own if coming is None else own + coming.wait()
        lost = None
        if sinks is not None:
            weights = (by_head(sinks) - top).exp() / total
            lost = -(weights * shared).sum((0, 2, 3)).to(sinks.dtype).view_as(sinks)
        back = found.to(query.dtype), *halves(both.to(key.dtype), key), lost
        return (*back, *[None] * len(ctx.rest))


def gradients(
    facts: list[Tensor],
    block: tuple[Tensor, ...],
    seen: Tensor | None,
    drop: Callable[[Tensor], Tensor],
    of_scores: Any,
) -> tuple[Tensor, Tensor]:
    """Those of a tile's queries, and of its keys and values."""
    query, grad, shared, top, total = facts
    tile, value = Scores(query, block[0], seen, *of_scores), block[1]
    weights, given = tile.values.sub_(top).exp_().div_(total), tile.joined(grad)
    changes = drop(tile.apart(multiplied(given, value.flatten(0, 1).mT)))
    slopes = changes.sub_(shared).mul_(weights).mul_(tile.slope)
    both = tile.summed(slopes, tile.query), tile.summed(drop(weights), given)
    return tile.averaged(slopes, block[0]), torch.cat(both, -1)


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
    """What belongs to keys and to values, in that order."""
    return block[..., : key.shape[-1]], block[..., key.shape[-1] :]


def by_head(sinks: Tensor) -> Tensor:
    return sinks.float().view(1, -1, 1, 1)
