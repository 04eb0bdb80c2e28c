"""The exchange between the ranks of a context axis in an attention module.

A Ulysses all-to-all gives each of some ranks a shard of the heads for all their tokens.
Keys and values of the other ranks are all-gathered, or passed around in a ring. Either
group can be all ranks of the axis (USP, arXiv:2405.07719).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from planc.compat.meshes import DeviceMesh
from planc.runtime.standalone.collectives import GatherSequence, swap_sharded_dim
from planc.runtime.standalone.context_ring import OTHERS, MaskUnread, Ring
from planc.runtime.standalone.context_tokens import ContextError


class KeyExchange:
    """The exchange by which the queries of a rank reach the keys of all ranks.

    Args:
        mesh: the ranks that share a sequence.
        attention: as of `ContextParallel`.
        ulysses: the number of ranks of a Ulysses all-to-all, if not all.
    """

    ring: Ring | None = None
    """The ranks around which keys and values go."""

    def __init__(self, mesh: DeviceMesh, attention: str, ulysses: int) -> None:
        ranks = mesh.size()
        self.heads = ranks if attention == "ulysses" else ulysses
        """The number of ranks that have some heads each of the same tokens."""
        if ranks % self.heads:
            text = (
                f"{ranks} ranks of the context axis are not divisible by {self.heads}"
            )
            raise ContextError(f"`ulysses`: {text}")
        self.others = ranks // self.heads
        """The number of ranks that have other tokens, and the same heads."""
        self.rank, self.among = divmod(mesh.get_local_rank(), self.heads)
        if 1 < self.heads < ranks:
            both = mesh._unflatten(0, (self.others, self.heads), ("others", "heads"))
            self.groups = [both.get_group(n) for n in ("others", "heads")]
        else:
            self.groups = [mesh.get_group()] * 2
        if attention == "ring":
            self.ring = Ring(self.groups[0])

    def gather_tokens(self, part: Tensor) -> Tensor:
        """A tensor `[rows, heads, tokens, ...]` of the other ranks, rank by rank."""
        gathered: Tensor = GatherSequence.apply(part, self.groups[0])
        return gathered

    def swap_sharded_dim(
        self, value: Tensor, source: int, target: int, name: str
    ) -> Tensor:
        """An all-to-all that unshards dim `target` and shards dim `source`.

        Args:
            value: `[rows, heads, tokens, features]`.
            source, target: dims of heads and tokens, or of tokens and heads.
            name: of the attention module, for messages.
        """
        if value.shape[source] % self.heads:
            text = f"{value.shape[1]} heads of {name} are not divisible by {self.heads}"
            raise ContextError(f"{text} ranks of the context axis")
        return swap_sharded_dim(value, self.groups[1], source, target)

    def heads_of(self, heads: Tensor) -> Tensor:
        """The numbers of this rank's heads, of those of each head in dim 0."""
        return heads.unflatten(0, (self.heads, -1))[self.among]


class SomeHeads:
    """An attention module to code that reads its sinks, one of each head.

    Args:
        module: whose other attributes are as they are.
        sinks: of this rank's heads.
    """

    def __init__(self, module: nn.Module, sinks: Tensor) -> None:
        self.module, self.sinks = module, sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class SeveralMasks(MaskUnread):
    """The masks of attention modules that exchange keys in several ways, as they ask.

    Args:
        make: the mask for a `KeyExchange`.
        queries: the tokens of a rank.
        ranks: how many share a sequence.
    """

    way_out = f"{OTHERS} in all layers"

    def __init__(
        self, make: Callable[[KeyExchange], Any], queries: int, ranks: int
    ) -> None:
        self.make, self.shape = make, (queries, queries * ranks)
        self.found: dict[tuple[int, bool], Any] = {}

    def mask_for(self, keys: KeyExchange) -> Any:
        """The mask of modules that exchange these keys."""
        at = keys.heads, keys.ring is not None
        if at not in self.found:
            self.found[at] = self.make(keys)
        return self.found[at]
