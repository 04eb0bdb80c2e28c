"""Which parameters take gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planc.model.facts import Modules
from planc.ops.base import Op
from planc.ops.call import Call, Context, Each, ScriptFunction, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(Op):
    """`module.requires_grad_(trainable)` for each module; later ones may be inside earlier ones."""

    modules: Modules
    trainable: bool = False

    SCRIPT: ClassVar = ScriptFunction("freeze", "Says which parameters take gradients.")

    def calls(self, _context: Context) -> Iterator[Step]:
        call = Call(".requires_grad_", (self.trainable,))
        yield Each(modules=self.modules, calls=(call,), note=self.place)
