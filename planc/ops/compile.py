"""`module.compile`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planc.model.facts import Modules
from planc.ops.base import AxisSizes, Op
from planc.ops.call import Context, Each, FunctionCall, ScriptFunction, Step, given


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(Op):
    """`module.compile(fullgraph=...)`."""

    modules: Modules
    fullgraph: bool = False

    SCRIPT: ClassVar = ScriptFunction("compile_blocks", "Compiles each block.")

    def calls(self, _context: Context) -> Iterator[Step]:
        call = FunctionCall(".compile", (), given(fullgraph=self.fullgraph or None))
        yield Each(modules=self.modules, calls=(call,), note=self.place)

    WORD: ClassVar = "compile"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)
    WORDS: ClassVar = {
        "fullgraph": ("", lambda full: "full graph" if full else "graph with breaks")
    }

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        return "as one graph, or fail" if self.fullgraph else ""
