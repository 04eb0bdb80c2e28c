"""The stages of a pipeline: which blocks the ranks at one place of its axis hold, and the schedule.

`torch.distributed.pipelining` has the schedules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, get_args

from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops import call, phrases
from planc.ops.base import (
    OMIT,
    Axis,
    AxisSizes,
    Count,
    Entry,
    Fact,
    Name,
    Op,
    Size,
    Some,
    choice,
    text,
)

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
OF_FILES = ("timetable", "timetable_v")
"""Schedules from a file: stages in turn over the ranks, or there and back."""
Row = Annotated[
    str, text("timetable", "the passes of a rank", r"\d+[FBIW]\d+(,\d+[FBIW]\d+)*", most=2**20)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Op):
    """Leaves a rank the parameters of its stages; the forward stays the model's own.

    Args:
        axis: whose ranks are stages.
        own: the stages of these ranks.
        blocks: the list of blocks.
        bounds: the index of the first block of each stage, and the number of blocks.
        inputs: modules of the first stage besides its blocks.
        outputs: modules of the last stage besides its blocks.
        returned: the number of values that a block returns in a tuple; 0 for a tensor.
        shared: modules of the first and of the last stage that share a parameter: both stages
            hold it, and its gradient is the sum of theirs.
        ties: the first names of these parameters.
        timetable: where a file is the schedule, the passes of each rank in order: `0F2` is the
            forward of microbatch 2 on stage 0, `B` its backward, `I` and `W` the gradients of
            inputs and of weights apart, as `torch.distributed.pipelining` writes them.
        added: the number of first blocks to whose outputs features of images are added, if the
            first stage has fewer; else 0.
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
    timetable: tuple[Row, ...] = field(default=(), metadata=OMIT)
    added: Count = field(default=0, metadata=OMIT)

    SCRIPT: ClassVar = call.ScriptFunction(
        "keep_stages", "Keeps the parameters of this rank's stages."
    )
    WORD: ClassVar = "pipeline"

    @property
    def stages(self) -> int:
        """The number of all stages."""
        return len(self.bounds) - 1

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        if self.timetable:
            return any("W" in row for row in self.timetable)
        return self.schedule in ("zero_bubble", "zbv", "dualpipe_v")

    @property
    def last(self) -> bool:
        """Whether these ranks compute the loss."""
        return self.stages - 1 in self.own

    def stage_of(self, block: int) -> int:
        """The stage that a block belongs to."""
        return next(i for i, stop in enumerate(self.bounds[1:]) if block < stop)

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        made = call.FunctionCall(
            "standalone.pipeline:split",
            (call.MODEL, call.Index(call.MESH, (self.axis,))),
            (
                ("own", call.Items(self.own)),
                ("blocks", str(self.blocks)),
                ("bounds", call.Items(self.bounds)),
                ("inputs", call.Members(self.inputs)),
                ("outputs", call.Members(self.outputs)),
                ("returned", self.returned),
                ("shared", call.Members(self.shared)),
                ("ties", call.Items(self.ties)),
                ("schedule", self.schedule),
                ("microbatches", self.microbatches),
                *([("timetable", call.Items(self.timetable))] if self.timetable else []),
                *([("added", self.added)] if self.added else []),
            ),
        )
        yield call.Once(call=made, note=self.place)

    @property
    def about(self) -> str:
        return f"stage{'s' * (len(self.own) > 1)} {', '.join(map(str, self.own))}"

    def headline(self, mesh: AxisSizes | None = None) -> str:
        over = phrases.axes((self.axis,), mesh)
        return f"{self.schedule} over {over}, {self.microbatches:,} microbatches"

    def held(self, stage: int) -> tuple[Modules, ...]:
        """The modules of a stage: its blocks and, at the ends, what is before and after them."""
        wanted = Indices.of(range(*self.bounds[stage : stage + 2]))
        blocks = [
            Modules((*self.blocks.path, both), child.module)
            for child in self.blocks.module.children
            if child.indices is not None and (both := child.indices & wanted)
        ]
        first = self.inputs if stage == 0 else ()
        return (*first, *blocks, *(self.outputs if stage == self.stages - 1 else ()))

    def _text(self, stage: int) -> str:
        """The modules of a stage: `model.embed_tokens, model.layers[0:8]`."""
        wanted = Indices.of(range(*self.bounds[stage : stage + 2]))
        names = [f"{self.blocks}{wanted}"]
        if stage == 0:
            names = [*phrases.together(map(str, self.inputs)), *names]
        if stage == self.stages - 1:
            names += phrases.together(map(str, self.outputs))
        return ", ".join(names)

    @classmethod
    def section(cls, ops: Sequence[Self], mesh: AxisSizes) -> Iterator[str]:
        yield phrases.head(cls.WORD, ops[0].headline(mesh))
        for name in ops[0].ties:
            both = f"stages 0 and {ops[0].stages - 1}"
            yield phrases.head("", f"{name} is on {both}, its gradient the sum of both")
        for stage in range(ops[0].stages):
            yield phrases.head("", f"stage {stage}  {ops[0]._text(stage)}")

    def entries(self, _common: object) -> Iterator[Entry]:
        for stage in self.own:
            yield Entry(
                kind=self.WORD,
                place=self.place,
                label=f"stage {stage}",
                facts=(
                    Fact("modules", self._text(stage)),
                    Fact("schedule", self.schedule),
                    Fact("microbatches", self.microbatches),
                    *(Fact(f"passes of rank {i}", row) for i, row in enumerate(self.timetable)),
                ),
                brief=f"{self._text(stage)}, {self.headline()}",
            )
