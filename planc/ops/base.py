"""What every operation has."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Args:
    place: the `.plan` line that asked for it, as `name:line`; empty for what planc adds itself.
    """

    place: str = field(default="", compare=False)
