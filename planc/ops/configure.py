"""A setting of the model's configuration that training needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from planc.ops.base import Op, text

Field = Annotated[
    str,
    text("field", "`use_cache`, of the configuration or of one inside it", r"(\w+\.)*use_cache"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure(Op):
    """`model.config.<name> = value`, where training needs it; `reason` says why."""

    name: Field
    value: bool
    reason: str = field(default="", compare=False)
