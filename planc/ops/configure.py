"""A field of the model's configuration that training needs changed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Self

from planc.ops import phrases
from planc.ops.base import AxisSizes, Op, Phase, text
from planc.ops.call import MODEL, Context, FunctionCall, Once, ScriptFunction, Step

Field = Annotated[
    str, text("field", "`use_cache`, of the configuration or of a nested one", r"(\w+\.)*use_cache")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure(Op):
    """Sets a field of the configuration, in every copy that the model's modules hold; `reason`
    says why training needs it.
    """

    name: Field
    value: bool
    reason: str = field(default="", compare=False)

    SCRIPT: ClassVar = ScriptFunction("configure", "Sets configuration fields that training needs.")

    def calls(self, _context: Context) -> Iterator[Step]:
        call = FunctionCall("standalone.configuration:set_config", (MODEL, self.name, self.value))
        yield Once(call=call, note=self.reason)

    def misfits(self, modules: Mapping[str, Any]) -> Iterator[str]:
        try:
            attrgetter(f"config.{self.name}")(modules[""])
        except AttributeError:
            yield f"the model has no config.{self.name}"

    ALONE: ClassVar = True
    PHASE: ClassVar = Phase.MODEL
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
