"""The reset of recurrent states at documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planc.ops.base import AxisSizes, Name, Phase, Some
from planc.ops.call import MODEL, Context, FunctionCall, Once, ScriptFunction, Step
from planc.ops.registry import SectionOp


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetStates(SectionOp):
    """Resets recurrent states at each document, in batches that pack several documents in a row.

    Args:
        parts: the functions, methods and modules that update recurrent states.
    """

    parts: Some[Name]

    SECTION: ClassVar = "documents"
    SCRIPT: ClassVar = ScriptFunction(
        "keep_documents_apart", "Resets recurrent states at documents."
    )

    def calls(self, _context: Context) -> Iterator[Step]:
        call = FunctionCall("standalone.documents:reset_states", (MODEL, *self.parts))
        yield Once(call=call)

    @property
    def state_updates(self) -> tuple[str, ...]:
        return self.parts

    PHASE: ClassVar = Phase.DOCUMENTS
    WORD: ClassVar = "documents"

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        return f"recurrent states are reset at each: {', '.join(self.parts)}"


KINDS = (ResetStates,)
