"""The operation of the clamp section."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planc.model.facts import Modules
from planc.ops.base import AxisSizes, Phase, Positive
from planc.ops.call import Context, Each, FunctionCall, ScriptFunction, Step
from planc.ops.decisions import Decision, Question, decision_around
from planc.ops.registry import SectionOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp(SectionOp):
    """Keeps the outputs of modules between two values."""

    modules: Modules
    most: Positive

    SECTION: ClassVar = "clamp"
    PHASE: ClassVar = Phase.LOSS
    ALONE: ClassVar = True
    WORD: ClassVar = "clamp"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)
    SCRIPT: ClassVar = ScriptFunction("clamp_outputs", "Keeps outputs between two values.")

    def calls(self, _context: Context) -> Iterator[Step]:
        call = FunctionCall("sections.clamp.standalone:clamp", (self.most,))
        yield Each(modules=self.modules, calls=(call,), note=self.place)

    def decisions(self, question: Question) -> Iterator[Decision]:
        yield from decision_around(self.modules, self.headline(), question)

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        return f"outputs of at most {self.most:g}"


KINDS = (Clamp,)
