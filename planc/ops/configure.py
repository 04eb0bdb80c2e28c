"""A setting of the model's configuration that training needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from planc.ops.base import Op, text
from planc.ops.call import MODEL, Assign, Attribute, Context, ScriptFunction, Step

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

    SCRIPT: ClassVar = ScriptFunction("configure", "Sets what training needs of the configuration.")

    def calls(self, _context: Context) -> Iterator[Step]:
        target = Attribute(MODEL, f"config.{self.name}")
        yield Assign(target=target, value=self.value, note=self.reason)
