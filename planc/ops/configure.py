"""A setting of the model's configuration that training needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from planc.ops.base import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure(Op):
    """`model.config.<name> = value`, where training needs it; `reason` says why."""

    name: str
    value: bool
    reason: str = field(default="", compare=False)
