"""Which parameters take gradients."""

from __future__ import annotations

from dataclasses import dataclass

from planc.model.facts import Modules
from planc.ops.base import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(Op):
    """`module.requires_grad_(trainable)` for each module; later ones may be inside earlier ones."""

    modules: Modules
    trainable: bool = False
