"""What every operation has, and the smallest one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Args:
    place: the `.plan` line that asked for it, as `name:line`; empty for what planc adds itself.
    """

    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(Op):
    """The random state of an axis's first rank on all its ranks, so that they draw alike.

    Args:
        axis: whose ranks work on the same activations.
        fields: what draws, as `name = value` of the configuration; for the reader.
    """

    axis: str
    fields: tuple[str, ...] = field(default=(), compare=False)
