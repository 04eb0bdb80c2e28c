"""Towers of images and of sound that ranks run together: those that have the same images divide
them, and data ranks run a tower whether or not their batches have any.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from planc.model.facts import Modules, below, is_inside
from planc.model.module_table import LANGUAGE_MODEL
from planc.ops import phrases
from planc.ops.base import OMIT, Axes, Axis, AxisSizes, Name, Phase, Size, StepFacts
from planc.ops.call import (
    MESH,
    MODEL,
    Context,
    Each,
    FunctionCall,
    Index,
    MeshOf,
    ScriptFunction,
    Step,
    drop_none,
)
from planc.ops.decisions import Decision, Question
from planc.ops.registry import SectionOp


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTower(SectionOp):
    """Makes data ranks without images, or sound, run the tower on those of another rank.

    Args:
        modules: the module whose code puts their features among the embeddings of tokens.
        axes: whose ranks read different data.
    """

    modules: Modules
    axes: Axes

    SECTION: ClassVar = "images"
    ANSWER: ClassVar = "towers"
    SCRIPT: ClassVar = ScriptFunction(
        "share_tower", "Ranks without images, or sound, run the tower on those of another."
    )

    def decisions(self, question: Question) -> Iterator[Decision]:
        if self.modules.has(question.name) or self.runs_everywhere(question.name):
            yield Decision(self.headline(question.mesh), str(self.modules))

    PHASE: ClassVar = Phase.INPUTS
    WORD: ClassVar = "towers"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)

    @property
    def shared_encoders(self) -> tuple[Modules, ...]:
        return (self.modules,)

    def runs_everywhere(self, parameter: str) -> bool:
        inside = (name for name in self.modules.names() if below(parameter, name))
        return any(not below(parameter, f"{name}.{LANGUAGE_MODEL}") for name in inside)

    def calls(self, _context: Context) -> Iterator[Step]:
        function = "standalone.towers:tower_on_all_ranks"
        call = FunctionCall(function, (MeshOf(self.axes), MODEL))
        yield Each(modules=self.modules, calls=(call,))

    def headline(self, mesh: AxisSizes | None = None) -> str:
        return (
            f"run on all ranks of {phrases.axes(self.axes, mesh)}, where some have images or sound"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DivideImages(SectionOp):
    """Divides the images of a batch over ranks that all have them: each rank runs the tower on its
    own, and all get the features of all.

    Args:
        modules: the module whose code puts features of images among the embeddings of tokens.
        tower: what computes these features, modules and parameters of its own.
        axis: its ranks have the same images.
        parts: whether each rank has a part of the gradient of the features, that of its tokens;
            else each has the whole gradient.
        times: what gradients of features are multiplied by: the ranks of the axis, where FSDP takes
            their mean.
    """

    modules: Modules
    tower: tuple[Name, ...]
    axis: Axis
    parts: bool = field(default=False, metadata=OMIT)
    times: Size = field(default=1, metadata=OMIT)

    SECTION: ClassVar = "images"
    ANSWER: ClassVar = "towers"
    SCRIPT: ClassVar = ScriptFunction(
        "divide_images", "Each rank of an axis runs the tower on some of the images."
    )

    def decisions(self, question: Question) -> Iterator[Decision]:
        if self.modules.has(question.name) or is_inside(question.name, self.tower):
            yield Decision(self.headline(question.mesh), str(self.modules))

    def uncounted_traffic(self, step: StepFacts) -> str:
        return f"how many features each image has, 8 bytes an image over {self.axis}"

    PHASE: ClassVar = Phase.INPUTS
    WORD: ClassVar = "images"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules", "tower", "axis")

    @property
    def divided_encoders(self) -> tuple[str, ...]:
        return self.tower

    def calls(self, _context: Context) -> Iterator[Step]:
        keywords = drop_none(
            parts=self.parts or None, times=None if self.times == 1 else self.times
        )
        mesh = Index(MESH, (self.axis,))
        call = FunctionCall("standalone.divided_images:images_by_rank", (mesh,), keywords)
        yield Each(modules=self.modules, calls=(call,), note=self.place)

    def headline(self, mesh: AxisSizes | None = None) -> str:
        axis = phrases.axes((self.axis,), mesh)
        times = f", whose gradients are multiplied by {self.times}" if self.times > 1 else ""
        return f"divided over {axis}, each rank gets the features of all{times}"


KINDS = (DivideImages, ShareTower)
