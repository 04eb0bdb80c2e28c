"""What a rank holds at the moments of a step that may be its peak."""

from __future__ import annotations

from dataclasses import dataclass

from planc.source import Span

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What some bytes are.

    Args:
        name: parameters, gradients, the activations of a kind of layer.
        size: bytes.
        how: how the number comes about.
        origin: the plan's line that decides it, if one does.
    """

    name: str
    size: float
    how: str
    origin: Span | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What exists at one time of a step."""

    name: str
    items: tuple[Item, ...]

    @property
    def size(self) -> float:
        return sum(item.size for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of the ranks of one pipeline rank.

    Args:
        rank: in the pipeline.
        moments: candidates for the peak, in the order of a step.
    """

    rank: int
    moments: tuple[Moment, ...]

    @property
    def largest(self) -> Moment:
        return max(self.moments, key=lambda m: m.size)

    @property
    def peak(self) -> float:
        """Bytes that the allocator has handed out at most."""
        return self.largest.size
