"""Experts that take a limited number of each row's tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.base import OMIT, Axis, AxisSizes, Op, Phase, Positive, Size, choice
from planc.ops.call import (
    MESH,
    MODEL,
    Context,
    FunctionCall,
    Index,
    Members,
    Once,
    ScriptFunction,
    Step,
    drop_none,
)
from planc.ops.claims import CallClaim, ObservedCall, module_claim
from planc.ops.context import Balance

PROBS: Literal["probs"] = "probs"
POSITION: Literal["position"] = "position"
_DROPS = {PROBS: "of the lowest weights", POSITION: "of the last positions"}
Drop = Annotated[str, choice(*_DROPS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitExperts(Op):
    """Gives each expert a capacity for each row, and drops the tokens above it.

    Args:
        modules: fused experts, whose forward takes the experts of each token and their weights.
        experts: the number of experts on all ranks.
        capacity: the capacity factor: tokens of an expert in a row, relative to the mean.
        drop: the tokens to drop: those with the lowest weights, or the last ones.
        sent: whether the experts are expert-parallel, so that dropped tokens are not sent.
        axis: the axis that shards the sequence; None for full rows.
        balance: how the axis distributes tokens, as in context parallelism.
    """

    modules: Modules
    experts: Size
    capacity: Positive
    drop: Drop = PROBS
    sent: bool = field(default=False, metadata=OMIT)
    axis: Axis | None = field(default=None, metadata=OMIT)
    balance: Balance = field(default="none", metadata=OMIT)

    SCRIPT: ClassVar = ScriptFunction(
        "limit_slots", "Gives experts a number of slots in each row of tokens."
    )

    @property
    def communication_axes(self) -> tuple[str, ...]:
        return () if self.axis is None else (self.axis,)

    def claims(self, collective: ObservedCall) -> CallClaim | None:
        """Claims what its modules call."""
        return module_claim(collective, self.communication_axes, self.modules.names())

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that limit the tokens of each expert in a row."""
        return {"experts": self.experts, "capacity": self.capacity, "drop": self.drop}

    def calls(self, _context: Context) -> Iterator[Step]:
        keywords = drop_none(**self.settings, sent=self.sent or None)
        if self.axis:
            keywords += drop_none(context=Index(MESH, (self.axis,)), balance=self.balance)
        function = "standalone.expert_capacity:limit_experts"
        call = FunctionCall(function, (MODEL, Members((self.modules,))), keywords)
        yield Once(call=call, note=self.place)

    PHASE: ClassVar = Phase.CAPACITY
    WORD: ClassVar = "capacity"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)

    def headline(self, mesh: AxisSizes | None = None) -> str:
        rows = f", rows gathered over {phrases.axes((self.axis,), mesh)}" if self.axis else ""
        times = f"{self.capacity:g} times the mean of a row"
        return f"{times}, tokens {_DROPS[self.drop]} are dropped{rows}"
