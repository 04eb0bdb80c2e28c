"""Rotary embeddings that are equal on ranks with different rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planc.ops import call, phrases
from planc.ops.base import Axes, AxisSizes, Op, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLongestPosition(Op):
    """Gives rotary embeddings whose frequencies depend on the longest position of a pass the
    longest one of all data ranks.

    Args:
        axes: the axes whose ranks read different rows, outermost first.
    """

    axes: Axes

    SCRIPT: ClassVar = call.ScriptFunction(
        "share_longest_position", "Rotary frequencies depend on the longest row of all data ranks."
    )
    PHASE: ClassVar = Phase.INPUTS
    WORD: ClassVar = "rotary"

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        given = (call.MODEL, call.MeshOf(self.axes))
        function = "standalone.rotary:use_longest_position"
        yield call.Once(call=call.FunctionCall(function, given))

    def headline(self, mesh: AxisSizes | None = None) -> str:
        return f"the longest position of a pass on all ranks of {phrases.axes(self.axes, mesh)}"
