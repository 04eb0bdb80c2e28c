"""Ranks that each compute a part of every sequence."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Annotated, ClassVar, Self

from planc.model.facts import Modules
from planc.model.patches import AFTER_TEXT, ALONE, BEFORE_TEXT
from planc.ops import call, phrases
from planc.ops.base import (
    OMIT,
    Axis,
    AxisRole,
    AxisSizes,
    Name,
    Op,
    Phase,
    Size,
    choice,
    text,
)
from planc.ops.claims import MODULE, CallClaim, ObservedCall
from planc.ops.decisions import Decision, Question

_EXCHANGES = {
    "all_gather": "keys and values are all-gathered",
    "ulysses": "Ulysses all-to-all",
    "ring": "ring attention",
    "gather": "attention gathers the tokens of all",
}
_STATES = {
    "state": "recurrent states are passed on",
    "gather": "inputs of recurrent states are gathered",
}
_PATCHES = (ALONE, AFTER_TEXT, BEFORE_TEXT)
_TOKENS = {
    "none": "a run of tokens",
    "head_tail": "a run of each half",
    "per_document": "a run of each half of each document",
}
Balance = Annotated[str, choice(*_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysOp(Op):
    """Says what attention exchanges over an axis.

    Args:
        axis: its ranks read the same rows.
        attention: `all_gather` of keys and values, `ring`, where each rank sends them to the next,
            `ulysses`, an all-to-all of sequence shards and heads, or `gather` of the inputs of
            modules with attention code of their own.
        ulysses: with `all_gather` and `ring`, the number of ranks of a Ulysses all-to-all before
            it; keys and values then come from the other ranks.
    """

    axis: Axis
    attention: Annotated[str, choice(*_EXCHANGES)] = "all_gather"
    ulysses: Size = field(default=1, metadata=OMIT)

    def ulysses_ranks(self, ranks: int) -> int:
        """The number of ranks in one Ulysses all-to-all; each gets a shard of the heads."""
        return ranks if self.attention == "ulysses" else gcd(self.ulysses, ranks)

    def among(self, ranks: int, real: int) -> Self:
        """The operation on an axis of a small mesh, where the real one has `real` ranks."""
        least = 2 if ranks > 2 and 1 < self.ulysses < real else gcd(self.ulysses, ranks)
        return replace(self, ulysses=least)

    @property
    def keys(self) -> tuple[tuple[str, call.Value], ...]:
        """The arguments of the runtime's functions."""
        several = self.ulysses if self.ulysses > 1 else None
        return call.drop_none(attention=self.attention, ulysses=several)

    def exchange_text(self, mesh: AxisSizes | None) -> str:
        """`ring attention over cp = 8, Ulysses all-to-all among 2 ranks`."""
        text = f"{_EXCHANGES[self.attention]} over {phrases.axes((self.axis,), mesh)}"
        among = f", Ulysses all-to-all among {self.ulysses} ranks"
        return text + among * (self.ulysses > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel(KeysOp):
    """Splits each sequence over an axis; attention sees the tokens of all its ranks.

    Args:
        balance: which tokens a rank has: `none`, one run; `head_tail`, one of 2 x ranks runs from
            the beginning and its mirror image from the end; `per_document`, the same in each
            packed document.
        exchange: how ranks exchange recurrent states: `state` passes them on, `gather` all-gathers
            their inputs, from which each rank computes all states.
        states: the functions, methods and modules with recurrent state.
        holder: the module that puts features of images among the embeddings of whole rows, which
            are cut in front of its language model; empty for a model of text alone.
        blocks: the first and the last block, between which `gather` leaves each rank its tokens;
            of a model of images the first block, and the module whose outputs are gathered.
        heads: the modules behind them that compute logits.
        seeing: the modules in blocks that `gather` the tokens of all ranks, or in which patches of
            images see each other.
        patches: of a model of images, which gets whole ones: where its patches, of which each rank
            has a part, are among the tokens of attention: `alone`, `after_text` or `before_text`;
            text is whole on each rank. Empty for a model of text.
    """

    balance: Balance = "head_tail"
    exchange: Annotated[str, choice(*_STATES)] = field(default="state", metadata=OMIT)
    states: tuple[Name, ...] = field(default=(), metadata=OMIT)
    holder: Annotated[str, text("module", "a module, or none", r"[\w.-]*")] = field(
        default="", metadata=OMIT
    )
    blocks: tuple[Name, ...] = field(default=(), metadata=OMIT)
    heads: tuple[Modules, ...] = field(default=(), metadata=OMIT)
    seeing: tuple[Modules, ...] = field(default=(), metadata=OMIT)
    patches: Annotated[str, choice("", *_PATCHES)] = field(default="", metadata=OMIT)

    SCRIPT: ClassVar = call.ScriptFunction(
        "split_sequences",
        "Computes a part of each sequence: `model.context_parallel.batch(batch)` is this rank's.",
    )
    ROLE: ClassVar = AxisRole.SEQUENCE
    CARRIES: ClassVar = "keys and values of a sequence"
    UNDONE_BY: ClassVar = {"set_attn_implementation": "the attention that knows parts of sequences"}

    @property
    def split_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def claims(self, collective: ObservedCall) -> CallClaim | None:
        """Claims what any module calls."""
        return MODULE if self.axis in collective.axes and collective.module else None

    @property
    def packages(self) -> tuple[str, ...]:
        return ("transformers",)

    @property
    def of_rows(self) -> bool:
        """Whether the model gets whole rows, which are cut inside of it."""
        return bool(self.holder or self.patches) or self.attention == "gather"

    @property
    def runs(self) -> int:
        """The runs of tokens that a rank has of a row, which all are equally long."""
        return 1 if self.balance == "none" else 2

    @property
    def state_updates(self) -> tuple[str, ...]:
        return self.states

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        keywords = self.keys + call.drop_none(balance=self.balance)
        if self.states:
            keywords += call.drop_none(exchange=self.exchange, states=self.states)
        mesh = call.Index(call.MESH, (self.axis,))
        function = "standalone.context:context_parallel"
        if self.patches:
            keywords += call.drop_none(
                blocks=call.Items(self.blocks),
                seeing=call.Members(self.seeing),
                patches=self.patches,
            )
            function = "standalone.context_patches:context_of_patches"
        elif self.attention == "gather":
            keywords += call.drop_none(
                blocks=call.Items(self.blocks),
                heads=call.Members(self.heads),
                seeing=call.Members(self.seeing),
            )
            function = "standalone.context_blocks:context_in_blocks"
        elif self.holder:
            keywords += call.drop_none(holder=self.holder)
            function = "standalone.context_images:context_behind_images"
        made = call.FunctionCall(function, (call.MODEL, mesh), keywords)
        yield call.Once(call=made, note=self.place)

    def decisions(self, question: Question) -> Iterator[Decision]:
        if any(modules.has(question.name) for modules in self.seeing):
            yield Decision(self.headline(question.mesh), question.name)

    PHASE: ClassVar = Phase.CONTEXT
    WORD: ClassVar = "context"
    ABOUT: ClassVar[tuple[str, ...]] = ("axis",)

    def headline(self, mesh: AxisSizes | None = None) -> str:
        """`keys and values are all-gathered over cp = 2, each rank has a run of each half`."""
        states = f", {_STATES[self.exchange]}" if self.states else ""
        tokens = f"each rank has {_TOKENS[self.balance]}"
        if self.patches:
            text = "" if self.patches == ALONE else ", and all text"
            tokens = f"each rank has a run of the patches{text}"
        tokens += " behind the images" if self.holder else ""
        return f"{self.exchange_text(mesh)}{states}, {tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend(KeysOp):
    """Attention modules that exchange otherwise than others of the model.

    Args:
        modules: that call the attention interface, or have such modules inside.
    """

    modules: Modules

    SCRIPT: ClassVar = call.ScriptFunction(
        "choose_exchanges", "Attention of some layers exchanges otherwise than that of others."
    )

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        mesh = call.Index(call.MESH, (self.axis,))
        arguments = call.Members((self.modules,)), mesh
        made = call.FunctionCall("standalone.context:attend_by", arguments, self.keys)
        yield call.Once(call=made, note=self.place)

    PHASE: ClassVar = Phase.CONTEXT
    WORD: ClassVar = "attention"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)

    def headline(self, mesh: AxisSizes | None = None) -> str:
        return self.exchange_text(mesh)
