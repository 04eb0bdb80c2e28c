"""`module.compile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.base import Mesh, Op
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

    WORD: ClassVar = "compile"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)
    WORDS: ClassVar = {
        "fullgraph": ("", lambda full: "full graph" if full else "graph with breaks")
    }

    def headline(self, _mesh: Mesh | None = None) -> str:
        return "as one graph, or fail" if self.fullgraph else ""

    @classmethod
    def section(cls, ops: Sequence[Self], _mesh: Mesh) -> Iterator[str]:
        return phrases.listing((cls.WORD, str(op.modules), op.headline()) for op in ops)
