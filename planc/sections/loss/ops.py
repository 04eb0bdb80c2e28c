"""The loss of a causal language model, in chunks of tokens and with a sharded vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.base import OMIT, Axes, AxisSizes, Form, Phase, Positive, Size
from planc.ops.call import (
    MODEL,
    Context,
    Each,
    FunctionCall,
    Keywords,
    ScriptFunction,
    Step,
    drop_none,
)
from planc.ops.claims import CallClaim, ObservedCall, module_claim
from planc.ops.registry import SectionOp

Fraction = Annotated[int | float, Form({"type": "number", "minimum": 0, "maximum": 1})]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLoss(SectionOp):
    """Computes the loss of labeled tokens in the head, so that whole logits never exist.

    Args:
        modules: the head, a linear layer.
        axes: the axis that its vocabulary is sharded over; empty for none.
        chunks: into how many parts the tokens of a rank are cut.
        scale: what the model multiplies its logits by.
        softcap: where the model caps its logits; None for none.
        label_smoothing, z_loss: what the loss adds.
    """

    modules: Modules
    axes: Axes = field(default=(), metadata=OMIT)
    chunks: Size = 1
    scale: Positive = field(default=1.0, metadata=OMIT)
    softcap: Positive | None = field(default=None, metadata=OMIT)
    label_smoothing: Fraction = field(default=0.0, metadata=OMIT)
    z_loss: Fraction = field(default=0.0, metadata=OMIT)

    SECTION: ClassVar = "loss"
    SENDS_ACTIVATIONS: ClassVar = True
    KIND: ClassVar[str] = "chunk_loss"
    SCRIPT: ClassVar = ScriptFunction("chunk_losses", "Computes the loss in chunks of tokens.")

    @property
    def communication_axes(self) -> tuple[str, ...]:
        return self.axes

    @property
    def loss_modules(self) -> tuple[Modules, ...]:
        return (self.modules,)

    @property
    def traced_modules(self) -> tuple[Modules, ...]:
        return (self.modules,)

    def claims(self, collective: ObservedCall) -> CallClaim | None:
        """Claims what the head calls."""
        return module_claim(collective, self.communication_axes, self.modules.names())

    def _terms(self) -> Keywords:
        """The arguments that are not at their defaults, but for the chunks."""
        return drop_none(
            scale=self.scale if self.scale != 1.0 else None,
            softcap=self.softcap,
            label_smoothing=self.label_smoothing or None,
            z_loss=self.z_loss or None,
        )

    def calls(self, _context: Context) -> Iterator[Step]:
        terms = (*drop_none(chunks=self.chunks), *self._terms())
        call = FunctionCall("standalone.loss:chunk_loss", (MODEL,), terms)
        yield Each(modules=self.modules, calls=(call,), note=self.place)

    PHASE: ClassVar = Phase.LOSS
    WORD: ClassVar = "loss"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)

    def headline(self, mesh: AxisSizes | None = None) -> str:
        split = f"vocabulary sharded over {phrases.axes(self.axes, mesh)}, " if self.axes else ""
        more = "".join(f", {name} = {value:g}" for name, value in self._terms())
        return f"cross entropy, {split}chunks = {self.chunks}{more}"


KINDS = (ChunkLoss,)
