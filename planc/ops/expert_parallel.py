"""Experts on ranks of their own, to which tokens are sent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self

from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.base import (
    OMIT,
    Axes,
    Axis,
    AxisRole,
    AxisSizes,
    Op,
    Phase,
    Shape,
    Some,
    choice,
)
from planc.ops.call import Context, Each, FunctionCall, MeshOf, ScriptFunction, Step, drop_none
from planc.ops.claims import CallClaim, ObservedCall, module_claim

ALL_TO_ALL: Literal["all_to_all"] = "all_to_all"
ALL_REDUCE: Literal["all_reduce"] = "all_reduce"
Dispatch = Annotated[str, choice(ALL_TO_ALL, ALL_REDUCE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchExperts(Op):
    """Divides the experts of modules over ranks, and brings each token to its experts.

    Args:
        modules: fused experts, whose parameters are [experts, ...].
        axis: of the ranks that divide them.
        dispatch: `all_to_all` sends tokens to the ranks of their experts and the results back; with
            `all_reduce` each rank computes its experts for all tokens, and the results are summed.
        shared: but for `all_reduce`, axes whose ranks have the same tokens: each rank sends a part.
        chunks: for `all_to_all`, into how many the tokens are cut: the next one is sent while the
            experts compute one.
        batched: whether the forward takes the hidden states of all experts in one tensor, and no
            choice of experts, as that of Llama 4.
        shapes: of the parameters.
    """

    modules: Modules
    axis: Axis
    dispatch: Dispatch = ALL_TO_ALL
    shared: Axes = field(default=(), metadata=OMIT)
    chunks: int = field(default=1, metadata=OMIT)
    batched: bool = field(default=False, metadata=OMIT)
    shapes: Some[Shape]

    KIND: ClassVar[str] = "dispatch_experts"
    SCRIPT: ClassVar = ScriptFunction(
        "divide_experts", "Divides experts over ranks, which exchange tokens."
    )
    ROLE: ClassVar = AxisRole.EXPERT
    CARRIES: ClassVar = "tokens, to their experts and back"

    @property
    def split_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def communication_axes(self) -> tuple[str, ...]:
        return (self.axis, *self.shared)

    @property
    def weight_shapes(self) -> tuple[Shape, ...]:
        return self.shapes

    @property
    def traced_modules(self) -> tuple[Modules, ...]:
        return (self.modules,)

    def claims(self, collective: ObservedCall) -> CallClaim | None:
        """Claims what its modules call."""
        return module_claim(collective, self.communication_axes, self.modules.names())

    def calls(self, _context: Context) -> Iterator[Step]:
        keywords = drop_none(
            shared=MeshOf(self.shared) if self.shared else None,
            batched=True if self.batched else None,
            chunks=self.chunks if self.chunks > 1 else None,
        )
        mesh = MeshOf((self.axis,))
        call = FunctionCall(
            "standalone.expert_parallel:dispatch_experts", (mesh, self.dispatch), keywords
        )
        yield Each(modules=self.modules, calls=(call,), note=self.place)

    PHASE: ClassVar = Phase.EXPERTS
    WORD: ClassVar = "experts"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)
    WORDS: ClassVar = {
        "axis": ("on", phrases.value),
        "shared": ("sent in parts over", lambda axes: phrases.axes(axes) or "none"),
        "chunks": ("chunks", phrases.value),
    }

    def headline(self, mesh: AxisSizes | None = None) -> str:
        how = f"{self.dispatch} on {phrases.axes((self.axis,), mesh)}"
        parts = f", tokens sent in parts over {phrases.axes(self.shared, mesh)}"
        chunks = f", in {self.chunks} chunks" if self.chunks > 1 else ""
        return how + (parts if self.shared else "") + chunks

    @classmethod
    def section(cls, ops: Sequence[Self], mesh: AxisSizes) -> Iterator[str]:
        for op in ops:
            yield phrases.head(cls.WORD, f"{op.modules}  {op.headline(mesh)}")
            sizes = ((s.name, f"{list(s.shape)} -> {list(s.local)}") for s in op.shapes)
            yield from phrases.table(sizes)
