"""Types of tensors on a rank, and the state of the inference of layouts.

A tensor is replicated, a sequence shard, a shard of features, or replicated as a DTensor whose
gradient is a sum; spmd_types has the same four types. A state is never changed, so each
alternative that is tried begins with the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from planc.model.dataflow import FlowCall
from planc.ops.styles import Style


class Held(Enum):
    """The type of a tensor on a rank."""

    WHOLE = "the full tensor"
    PART = "a sequence shard"
    VARYING = "a shard of the features"
    GATHERED = "the full tensor, as a DTensor"


class Clash(Exception):
    """Tensors that do not go together.

    Args:
        why: the reason, at a line of the model's code.
        cut: those that would have to be sequence shards.
        whole: those that would have to be whole.
        mixed: those that would have to be DTensors.
        rules: the modules whose rules gave the tensors.
    """

    def __init__(
        self,
        why: str,
        line: int = 0,
        *,
        cut: Iterable[int] = (),
        whole: Iterable[int] = (),
        mixed: Iterable[int] = (),
        rules: Iterable[str] = (),
    ) -> None:
        super().__init__(why)
        self.line, self.rules = line, tuple(rules)
        self.cut, self.whole, self.mixed = tuple(cut), tuple(whole), tuple(mixed)


class FoundRule(NamedTuple):
    """A rule that follows.

    Args:
        module, style: as in a plan.
        reason: why, as a sentence after "because".
        weights: the modules with split weights that it follows from.
        line: of the model's code.
        beside: the modules whose widths are the rest of a linear's output (`mla_kv`).
    """

    module: str
    style: Style
    reason: str = ""
    weights: tuple[str, ...] = ()
    line: int = 0
    beside: tuple[str, ...] = ()


class Tried(NamedTuple):
    """A clash that was met: the module in which, the reason, the line of the model's code, and the
    modules with the rules that gave the tensors.
    """

    module: str
    text: str
    line: int
    rules: tuple[str, ...] = ()


class Met(NamedTuple):
    """A whole tensor that meets a varying one in an operation; `is_weight`: of the module."""

    tensor: int
    varying: int
    line: int
    is_weight: bool


class CutOutput(NamedTuple):
    """A tensor that an operation of the model's code cuts along the dim over which it is split."""

    tensor: int
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of the inference after some calls.

    Args:
        kinds: of tensors; whole where it has none.
        dims: the dim along which a varying tensor is split, where that is known.
        met: whole tensors that met varying ones.
        cuts: varying tensors that were cut along their split dim.
        rules: that follow.
        sent: what is sent forward and backward, in hidden states.
        work: norms and sums of residuals that run on sequence shards.
    """

    kinds: Mapping[int, Held] = field(default_factory=dict)
    dims: Mapping[int, int | None] = field(default_factory=dict)
    met: tuple[Met, ...] = ()
    cuts: tuple[CutOutput, ...] = ()
    rules: tuple[FoundRule, ...] = ()
    sent: float = 0
    work: int = 0

    def kind(self, tensor: int) -> Held:
        return self.kinds.get(tensor, Held.WHOLE)

    def with_kind(self, tensors: Iterable[int], kind: Held) -> State:
        return replace(self, kinds={**self.kinds, **dict.fromkeys(tensors, kind)})

    def with_rules(self, *rules: FoundRule, sent: float = 0) -> State:
        return replace(self, rules=(*self.rules, *rules), sent=self.sent + sent)

    def some(self, call: FlowCall, *kinds: Held) -> list[tuple[str, int]]:
        """The arguments of a call that are of some kinds."""
        return [(key, t) for key, t in call.arguments if self.kind(t) in kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """The settings of the inference inside a module: whether outputs may be sequence shards, the
    outputs that were changed to fix clashes, whether a module may shard hidden states on the
    sequence, whether inputs are DTensors, and whether clashes are fixed.
    """

    sequence: bool
    forced: Mapping[str, Held] = field(default_factory=dict)
    may_enter: bool = True
    gathered: bool = False
    mends: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """All rules of a model.

    Args:
        rules: those that follow, and the split weights as completed.
        parts, sums: the sums of two hidden states that run on sequence shards, and all.
        around: the blocks that are gathered as one.
        why: the clashes that were met.
        cuts: the modules whose outputs the model's code cuts along their split dim, with the line.
    """

    rules: tuple[FoundRule, ...]
    parts: int
    sums: int
    around: tuple[str, ...]
    why: tuple[Tried, ...]
    cuts: tuple[tuple[str, int], ...] = ()

    @property
    def everywhere(self) -> bool:
        """Whether all sums of hidden states run on sequence shards."""
        return 0 < self.parts == self.sums and not self.around
