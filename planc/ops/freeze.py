"""The operation that sets which parameters require gradients."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.base import AxisSizes, Op, Phase
from planc.ops.call import Context, Each, FunctionCall, ScriptFunction, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(Op):
    """`module.requires_grad_(trainable)` for each module; a later operation may be on a
    submodule.
    """

    modules: Modules
    trainable: bool = False

    SCRIPT: ClassVar = ScriptFunction("freeze", "Sets which parameters require gradients.")

    def calls(self, _context: Context) -> Iterator[Step]:
        call = FunctionCall(".requires_grad_", (self.trainable,))
        yield Each(modules=self.modules, calls=(call,), note=self.place)

    ALONE: ClassVar = True
    SETS_TRAINING: ClassVar = True

    PHASE: ClassVar = Phase.FREEZE
    WORD: ClassVar = "training"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)
    WORDS: ClassVar = {"trainable": ("", lambda state: "trainable" if state else "frozen")}

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        return "trainable" if self.trainable else "frozen"

    @classmethod
    def section(cls, ops: Sequence[Self], _mesh: AxisSizes) -> Iterator[str]:
        return phrases.listing((op.headline(), str(op.modules), "") for op in ops)


def freezes(rules: Iterable[object]) -> tuple[Freeze, ...]:
    """The rules, or operations, that set which parameters train."""
    return tuple(rule for rule in rules if isinstance(rule, Freeze))
