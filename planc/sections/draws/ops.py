"""The random numbers of ranks that share activations: the same, or others by rank."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from planc.model.facts import Modules
from planc.ops import call, phrases
from planc.ops.base import OMIT, Axes, Axis, AxisSizes, Phase, Where
from planc.ops.registry import SectionOp


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRng(SectionOp):
    """Gives the random state of an axis's first rank to all its ranks.

    Args:
        axis: its ranks compute the same activations, so their dropout masks must be equal.
        fields: `name = value` of the configuration fields that use random numbers, for the reader.
    """

    axis: Axis
    fields: tuple[str, ...] = field(default=(), compare=False)

    KIND: ClassVar[str] = "draw"
    SCRIPT: ClassVar = call.ScriptFunction(
        "sync_rng", "Gives the ranks that share activations the same random state."
    )

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        made = call.FunctionCall("sections.draws.standalone:sync_rng_state", (call.MESH, self.axis))
        yield call.Once(call=made, note=", ".join(self.fields))

    SECTION: ClassVar = "draws"
    PHASE: ClassVar = Phase.RANDOM
    WORD: ClassVar = "random"
    ABOUT: ClassVar[tuple[str, ...]] = ("axis",)

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        text = f"state of the first rank of {self.axis} on all its ranks"
        return f"{text}: {', '.join(self.fields)}" if self.fields else text


def _phrase(by_rank: bool | None) -> str:
    """The word for whether random numbers differ by rank."""
    return "unchanged" if by_rank is None else "by rank" if by_rank else "alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawByRank(SectionOp):
    """Random numbers that differ by rank on shards of activations, and are the same elsewhere.

    Args:
        modules: the modules at which the layout of activations changes.
        axis: its ranks hold the shards.
        inside: whether the modules compute on shards; None if as before the module.
        after: whether their outputs are shards; None if as at the end of the module.
    """

    modules: Modules
    axis: Axis
    inside: bool | None = field(default=None, metadata=OMIT)
    after: bool | None = field(default=None, metadata=OMIT)

    SCRIPT: ClassVar = call.ScriptFunction(
        "draw_on_shards", "Draws by rank on shards of activations, and alike elsewhere."
    )

    def problems(self) -> Iterator[tuple[Where, str]]:
        if self.inside is None and self.after is None:
            yield (), "neither inside nor after is given"

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        mesh = call.Shared(f"{self.axis}_mesh", call.Index(call.MESH, (self.axis,)))
        keywords = call.drop_none(inside=self.inside, after=self.after)
        made = call.FunctionCall("sections.draws.standalone:draw_by_rank", (mesh,), keywords)
        yield call.Each(modules=self.modules, calls=(made,), note=self.place)

    SECTION: ClassVar = "draws"
    PHASE: ClassVar = Phase.RANDOM
    WORD: ClassVar = "draws"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules", "axis")
    WORDS: ClassVar = {"inside": ("inside", _phrase), "after": ("after", _phrase)}

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        if self.inside == self.after:
            return f"{_phrase(self.after)} inside and after"
        sides = (("inside", self.inside), ("after", self.after))
        return ", ".join(f"{_phrase(split)} {side}" for side, split in sides if split is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawApart(SectionOp):
    """Makes random numbers differ between pipeline stages and between ranks with sequence shards,
    which share rows of the batch but hold different layers or tokens.

    Args:
        axes: outermost first.
    """

    axes: Axes

    SCRIPT: ClassVar = call.ScriptFunction(
        "draw_by_place", "Uses other random numbers in each stage and for each sequence shard."
    )

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        given = (call.MODEL, call.MESH, self.axes)
        yield call.Once(call=call.FunctionCall("sections.draws.standalone:draw_apart", given))

    SECTION: ClassVar = "draws"
    PHASE: ClassVar = Phase.RANDOM
    WORD: ClassVar = "apart"

    def headline(self, mesh: AxisSizes | None = None) -> str:
        return f"other random numbers for each coordinate along {phrases.axes(self.axes, mesh)}"


KINDS = (SyncRng, DrawByRank, DrawApart)
