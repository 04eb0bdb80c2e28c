"""A field of the model's configuration that training needs changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Self

from planc.ops import phrases
from planc.ops.base import AxisSizes, Op, text
from planc.ops.call import MODEL, Assign, Attribute, Context, ScriptFunction, Step

Field = Annotated[
    str,
    text("field", "`use_cache`, of the configuration or of a nested one", r"(\w+\.)*use_cache"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure(Op):
    """`model.config.<name> = value`; `reason` says why training needs it."""

    name: Field
    value: bool
    reason: str = field(default="", compare=False)

    SCRIPT: ClassVar = ScriptFunction("configure", "Sets configuration fields that training needs.")

    def calls(self, _context: Context) -> Iterator[Step]:
        target = Attribute(MODEL, f"config.{self.name}")
        yield Assign(target=target, value=self.value, note=self.reason)

    WORD: ClassVar = "configure"
    ABOUT: ClassVar[tuple[str, ...]] = ("name",)
    WORDS: ClassVar = {"value": ("", phrases.value)}

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        return f"= {str(self.value).lower()}"

    @classmethod
    def section(cls, ops: Sequence[Self], _mesh: AxisSizes) -> Iterator[str]:
        for op in ops:
            reason = f": {' '.join(op.reason.split())}".removesuffix(": ")
            yield phrases.head(cls.WORD, f"{op.name} {op.headline()}{reason}")
