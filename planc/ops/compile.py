"""`module.compile`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planc.model.facts import Modules
from planc.ops.base import Op
from planc.ops.call import Call, Context, Each, ScriptFunction, Step, given


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(Op):
    """`module.compile(fullgraph=...)`."""

    modules: Modules
    fullgraph: bool = False

    SCRIPT: ClassVar = ScriptFunction("compile_blocks", "Compiles the blocks, each by itself.")

    def calls(self, _context: Context) -> Iterator[Step]:
        call = Call(".compile", (), given(fullgraph=self.fullgraph or None))
        yield Each(modules=self.modules, calls=(call,), note=self.place)
