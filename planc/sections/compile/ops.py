"""`module.compile`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.base import OMIT, Axes, AxisSizes, Phase, SimulationKind
from planc.ops.call import (
    Context,
    Each,
    FunctionCall,
    MeshOf,
    Once,
    ScriptFunction,
    Step,
    drop_none,
)
from planc.ops.decisions import Decision, Question, decision_around
from planc.ops.registry import SectionOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(SectionOp):
    """`module.compile(fullgraph=...)`.

    Args:
        async_tp: tensor axes whose all-gathers and reduce-scatters the compiler cuts into parts, to
            run them beside the matrix products that need them.
    """

    modules: Modules
    fullgraph: bool = False
    async_tp: Axes = field(default=(), metadata=OMIT)

    SCRIPT: ClassVar = ScriptFunction("compile_blocks", "Compiles each block.")

    def calls(self, _context: Context) -> Iterator[Step]:
        for axis in self.async_tp:
            function = "standalone.tensor_styles:enable_async_tp"
            yield Once(call=FunctionCall(function, (MeshOf((axis,)),)), note=self.place)
        call = FunctionCall(".compile", (), drop_none(fullgraph=self.fullgraph or None))
        yield Each(modules=self.modules, calls=(call,), note=self.place)

    @property
    def compiled_modules(self) -> tuple[Modules, ...]:
        return (self.modules,)

    SECTION: ClassVar = "compile"
    SIMULATION: ClassVar = SimulationKind.NEVER  # it takes minutes, and should change no results

    def omission(self, *, precision: bool) -> tuple[str, str]:
        return "compile", "the modules run uncompiled"

    def decisions(self, question: Question) -> Iterator[Decision]:
        text = "compiled as one graph, or fails" if self.fullgraph else "compiled"
        yield from decision_around(self.modules, text, question)

    PHASE: ClassVar = Phase.COMPILE
    WORD: ClassVar = "compile"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)
    WORDS: ClassVar = {
        "fullgraph": ("", lambda full: "full graph" if full else "graph with breaks"),
        "async_tp": (
            "asynchronous tensor parallelism over",
            lambda axes: phrases.axes(axes) or "none",
        ),
    }

    def headline(self, mesh: AxisSizes | None = None) -> str:
        over = f"asynchronous over {phrases.axes(self.async_tp, mesh)}" if self.async_tp else ""
        return ", ".join(filter(None, ("as one graph, or fail" * self.fullgraph, over)))


KINDS = (Compile,)
