"""Rotary embeddings that are equal on ranks with different rows or tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from planc.ops import call, phrases
from planc.ops.base import OMIT, Axes, AxisSizes, Op, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLongestPosition(Op):
    """Shares the longest position of a pass among all data ranks, sequence shards and microbatches,
    for rotary embeddings whose frequencies depend on it.

    Args:
        axes: the axes whose ranks read different rows, outermost first.
        parts: the axes whose ranks hold shards of each sequence.
    """

    axes: Axes
    parts: Axes = field(default=(), metadata=OMIT)

    SCRIPT: ClassVar = call.ScriptFunction(
        "share_longest_position", "Rotary frequencies depend on the longest row of all ranks."
    )
    PHASE: ClassVar = Phase.INPUTS
    WORD: ClassVar = "rotary"

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        meshes = (call.MeshOf(axes) if axes else None for axes in (self.axes, self.parts))
        given = (call.MODEL, *meshes)
        function = "standalone.rotary:use_longest_position"
        yield call.Once(call=call.FunctionCall(function, given))

    def headline(self, mesh: AxisSizes | None = None) -> str:
        what = "the longest position of a pass"
        axes = (*self.axes, *self.parts)
        return (
            f"{what} on all ranks of {phrases.axes(axes, mesh)}" if axes else f"{what} in all parts"
        )
