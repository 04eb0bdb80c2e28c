"""`module.compile`."""

from __future__ import annotations

from dataclasses import dataclass

from planc.model.facts import Modules
from planc.ops.base import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(Op):
    """`module.compile(fullgraph=...)`."""

    modules: Modules
    fullgraph: bool = False
