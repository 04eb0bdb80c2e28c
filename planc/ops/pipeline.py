"""The pipeline: the blocks of each pipeline rank's stages, and the schedule.

`torch.distributed.pipelining` has the schedules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, get_args

from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops import call, phrases
from planc.ops.base import (
    OMIT,
    Axis,
    AxisRole,
    AxisSizes,
    Count,
    Entry,
    Fact,
    Name,
    Op,
    Phase,
    Size,
    Some,
    choice,
    key,
    text,
)
from planc.ops.claims import MESSAGE, MESSAGES, CallClaim, ObservedCall

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
OF_FILES = ("timetable", "timetable_v")
"""Schedules from a file: stages in turn over the ranks, or there and back."""
Row = Annotated[
    str, text("rank_passes", "the passes of a rank", r"\d+[FBIW]\d+(,\d+[FBIW]\d+)*", most=2**20)
]


class Terms(NamedTuple):
    """The demands of a schedule.

    Args:
        each: the stages of each rank; 0 for any number above one.
        fill: whether it takes at least as many microbatches as stages.
        back: whether a rank's second stage is as far from the end as its first from the start.
    """

    each: int
    fill: bool
    back: bool = False

    def is_filled(self, microbatches: int, stages: int) -> bool:
        """Whether the microbatches are enough for the stages."""
        return not self.fill or microbatches >= stages

    def rounds(self, microbatches: int, ranks: int) -> bool:
        """Whether the schedule can divide the microbatches into rounds of equal size."""
        return bool(self.each) or microbatches % max(1, microbatches // ranks) == 0


TERMS = {
    "gpipe": Terms(1, False),
    "1f1b": Terms(1, True),
    "interleaved_1f1b": Terms(0, False),
    "zero_bubble": Terms(0, False),
    "zbv": Terms(2, False, True),
    "dualpipe_v": Terms(2, True, True),
    "timetable": Terms(0, False),
    "timetable_v": Terms(2, False, True),
}
"""Source: the constructors of `torch.distributed.pipelining.schedules` (torch 2.13)."""


def stages_of_rank(schedule: str, rank: int, ranks: int, stages: int) -> tuple[int, ...]:
    """The stages of one rank, in order: round robin, or there and back for a V schedule."""
    if TERMS[schedule].back:
        return (rank, stages - 1 - rank)
    return tuple(range(rank, stages, ranks))


Argument = Annotated[str, text("argument", "an argument of a block", r"\w+")]
"""By its name, or by its position where the model passes it without a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Parameters that several stages hold, whose gradients are the sums of these stages'.

    Args:
        stages: the stages, in order.
        parameters: the first name of each.
        modules: those that share them; a rank with one of the stages holds all of them.
    """

    stages: Some[Count]
    parameters: Some[Name]
    modules: tuple[Modules, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Op):
    """Keeps the parameters of a rank's stages only; the model's forward is unchanged.

    Args:
        axis: the pipeline axis.
        own: the stages of this pipeline rank.
        blocks: the list of blocks.
        bounds: the index of the first block of each stage, and the number of blocks.
        inputs: modules of the first stage besides its blocks.
        outputs: modules of the last stage besides its blocks.
        returned: the number of values that a block returns in a tuple; 0 for a tensor.
        shared: modules of the first and of the last stage that share a parameter: both stages
            hold it, and its gradient is the sum of theirs.
        ties: the first names of these parameters.
        copies: parameters that other stages share than these two.
        given: arguments of blocks, besides hidden states, that modules of the first stage compute;
            they are sent on to the stages of the blocks that take them.
        states: arguments of blocks that earlier blocks compute; a stage sends those of the first
            block of the next one.
        rank_passes: where a file is the schedule, the passes of each rank in order: `0F2` is the
            forward of microbatch 2 on stage 0, `B` its backward, `I` and `W` the gradients of
            inputs and of weights apart, as `torch.distributed.pipelining` writes them.
        added: the number of first blocks to whose outputs features of images are added, if the
            first stage has fewer; else 0.
        timed: the rows of a microbatch and the tokens of each, where stages are cut by the time
            that they take for it; it decides nothing else.
    """

    axis: Axis
    own: Some[Count]
    blocks: Modules
    bounds: Some[Count]
    schedule: Annotated[str, choice(*SCHEDULES, *OF_FILES)] = "1f1b"
    microbatches: Size = 1
    inputs: tuple[Modules, ...] = ()
    outputs: tuple[Modules, ...] = ()
    returned: Count = field(default=0, metadata=OMIT)
    shared: tuple[Modules, ...] = field(default=(), metadata=OMIT)
    ties: tuple[Name, ...] = field(default=(), metadata=OMIT)
    copies: tuple[Copies, ...] = field(default=(), metadata=OMIT)
    given: tuple[Argument, ...] = field(default=(), metadata=OMIT)
    states: tuple[Argument, ...] = field(default=(), metadata=OMIT)
    rank_passes: tuple[Row, ...] = field(default=(), metadata=OMIT | key("timetable"))
    added: Count = field(default=0, metadata=OMIT)
    timed: tuple[Size, ...] = field(default=(), metadata=OMIT)

    SCRIPT: ClassVar = call.ScriptFunction(
        "keep_stages", "Keeps the parameters of this rank's stages."
    )

    PHASE: ClassVar = Phase.MODEL
    WORD: ClassVar = "pipeline"
    LOOP_FUNCTIONS: ClassVar = ("forward_backward", "clip_grad_norm")
    ROLE: ClassVar = AxisRole.STAGE
    CARRIES: ClassVar = "activations, to the next stage"

    @property
    def split_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def simplify(self, context: call.Context, *, precision: bool) -> Self:
        # a schedule file has passes for its own number of microbatches
        return self if self.rank_passes else replace(self, microbatches=self.stages)

    def claims(self, collective: ObservedCall) -> CallClaim | None:
        """Claims the messages between stages."""
        sent = collective.kind in MESSAGES and self.axis in collective.axes
        return MESSAGE if sent else None

    @property
    def stages(self) -> int:
        """The number of all stages."""
        return len(self.bounds) - 1

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        if self.rank_passes:
            return any("W" in row for row in self.rank_passes)
        return self.schedule in ("zero_bubble", "zbv", "dualpipe_v")

    @property
    def shares(self) -> tuple[Copies, ...]:
        """All parameters that several stages hold."""
        ends = (0, self.stages - 1)
        both = Copies(stages=ends, parameters=self.ties, modules=self.shared)
        return (*((both,) if self.ties else ()), *self.copies)

    @property
    def shared_modules(self) -> tuple[Modules, ...]:
        """The modules of other stages that these ranks hold, as their own ones share parameters."""
        modules = (
            m for shared in self.shares if {*shared.stages} & {*self.own} for m in shared.modules
        )
        return tuple(dict.fromkeys(modules))

    def stage_of(self, block: int) -> int:
        """The stage that a block belongs to."""
        return next(i for i, stop in enumerate(self.bounds[1:]) if block < stop)

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        function_call = call.FunctionCall(
            "standalone.pipeline:split",
            (call.MODEL, call.Index(call.MESH, (self.axis,))),
            (
                ("local_stages", call.Items(self.own)),
                ("blocks", str(self.blocks)),
                ("bounds", call.Items(self.bounds)),
                ("inputs", call.Members(self.inputs)),
                ("outputs", call.Members(self.outputs)),
                ("returned", self.returned),
                ("shared", call.Members(self.shared)),
                ("ties", call.Items(self.ties)),
                ("schedule", self.schedule),
                ("microbatches", self.microbatches),
                *([("copies", call.Items(tuple(map(_group, self.copies))))] if self.copies else []),
                *([("given", call.Items(self.given))] if self.given else []),
                *([("states", call.Items(self.states))] if self.states else []),
                *([("rank_passes", call.Items(self.rank_passes))] if self.rank_passes else []),
                *([("added", self.added)] if self.added else []),
            ),
        )
        yield call.Once(call=function_call, note=self.place)

    @property
    def about(self) -> str:
        return f"stage{'s' * (len(self.own) > 1)} {', '.join(map(str, self.own))}"

    def headline(self, mesh: AxisSizes | None = None) -> str:
        over = phrases.axes((self.axis,), mesh)
        schedule = "a schedule file" if self.rank_passes else self.schedule
        parts = [f"{schedule} over {over}", f"{self.microbatches:,} microbatches"]
        return ", ".join([*parts, *(f"stages by {fact.value}" for fact in self._time_facts())])

    def stage_modules(self, stage: int) -> tuple[Modules, ...]:
        """The modules of a stage: its blocks and, at the ends, what is before and after them."""
        blocks = self.blocks.entries_in(self.blocks_of(stage))
        first = self.inputs if stage == 0 else ()
        return (*first, *blocks, *(self.outputs if stage == self.stages - 1 else ()))

    def blocks_of(self, stage: int) -> Indices:
        """The numbers of a stage's blocks."""
        return Indices.from_numbers(range(*self.bounds[stage : stage + 2]))

    def modules_of(self, stage: int) -> str:
        """The modules of a stage: `model.embed_tokens, model.layers[0:8]`."""
        names = [f"{self.blocks}{self.blocks_of(stage)}"]
        if stage == 0:
            names = [*phrases.together(map(str, self.inputs)), *names]
        if stage == self.stages - 1:
            names += phrases.together(map(str, self.outputs))
        return ", ".join(names)

    def _time_facts(self) -> Iterator[Fact]:
        """By what stages are cut, where it is time."""
        if self.timed:
            rows, tokens = self.timed
            yield Fact("cut by", f"the time of {rows:,} x {tokens:,} tokens")

    @classmethod
    def section(cls, ops: Sequence[Self], mesh: AxisSizes) -> Iterator[str]:
        yield phrases.head(cls.WORD, ops[0].headline(mesh))
        for shared in ops[0].shares:
            yield from map(partial(phrases.head, ""), _shared_by(shared))
        if sent := (*ops[0].given, *ops[0].states):
            yield phrases.head("", f"sent beside hidden states: {', '.join(map(_argument, sent))}")
        for stage in range(ops[0].stages):
            yield phrases.head("", f"stage {stage}  {ops[0].modules_of(stage)}")

    def entries(self, _common: object) -> Iterator[Entry]:
        for stage in self.own:
            yield Entry(
                kind=self.WORD,
                place=self.place,
                label=f"stage {stage}",
                facts=(
                    Fact("modules", self.modules_of(stage)),
                    Fact("schedule", self.schedule),
                    Fact("microbatches", self.microbatches),
                    *self._time_facts(),
                    *(Fact(f"passes of rank {i}", row) for i, row in enumerate(self.rank_passes)),
                ),
                brief=f"{self.modules_of(stage)}, {self.headline()}",
            )


def _group(copies: Copies) -> call.Value:
    """(stages, names, modules), as `Stages` takes them."""
    parts = call.Items(copies.stages), call.Items(copies.parameters), call.Members(copies.modules)
    return call.Items(parts)


def _shared_by(copies: Copies) -> Iterator[str]:
    """One line for all parameters of a module, as blocks may share tens of them."""
    *most, last = copies.stages
    where = f"stages {', '.join(map(str, most))} and {last}"
    total = "both" if len(most) == 1 else "all"
    first, *more = copies.parameters
    if len(more) > 1:
        yield f"{first} and {len(more)} more are on {where}, their gradients the sums of {total}"
        return
    for name in copies.parameters:
        yield f"{name} is on {where}, its gradient the sum of {total}"


def _argument(name: str) -> str:
    return f"argument {int(name) + 1} of blocks" if name.isdecimal() else f"`{name}` of blocks"
