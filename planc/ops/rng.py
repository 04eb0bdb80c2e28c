"""Which ranks draw the same random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from planc.ops.base import Axis, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(Op):
    """The random state of an axis's first rank on all its ranks, so that they draw alike.

    Args:
        axis: whose ranks work on the same activations.
        fields: what draws, as `name = value` of the configuration; for the reader.
    """

    axis: Axis
    fields: tuple[str, ...] = field(default=(), compare=False)
