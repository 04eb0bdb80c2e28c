"""Ranks that must draw the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from planc.ops.base import Axis, AxisSizes, Op
from planc.ops.call import MESH, Context, FunctionCall, Once, ScriptFunction, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRng(Op):
    """Gives the random state of an axis's first rank to all its ranks.

    Args:
        axis: its ranks work on the same activations, so their dropout masks must be equal.
        fields: `name = value` of the configuration fields that use random numbers, for the reader.
    """

    axis: Axis
    fields: tuple[str, ...] = field(default=(), compare=False)

    KIND: ClassVar[str] = "draw"
    SCRIPT: ClassVar = ScriptFunction(
        "sync_rng", "Gives the ranks that share activations the same random state."
    )

    def calls(self, _context: Context) -> Iterator[Step]:
        call = FunctionCall("standalone.rng:sync_rng_state", (MESH, self.axis))
        yield Once(call=call, note=", ".join(self.fields))

    WORD: ClassVar = "random"
    ABOUT: ClassVar[tuple[str, ...]] = ("axis",)

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        text = f"state of the first rank of {self.axis} on all its ranks"
        return f"{text}: {', '.join(self.fields)}" if self.fields else text
