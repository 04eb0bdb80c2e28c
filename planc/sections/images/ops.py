"""Towers of images and of sound that ranks run together: those that have the same images divide
them, and data ranks run a tower whether or not their batches have any.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from planc.model.facts import Modules, below
from planc.model.module_table import LANGUAGE_MODEL
from planc.ops import phrases
from planc.ops.base import OMIT, Axes, Axis, AxisSizes, Name, Op, Phase, Size, StepFacts
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTower(Op):
    """Makes data ranks without images, or sound, run the tower on those of another rank.

    Args:
        modules: the module whose code puts their features among the embeddings of tokens.
        axes: whose ranks read different data.
    """

    modules: Modules
    axes: Axes

    SCRIPT: ClassVar = ScriptFunction(
        "share_tower", "Ranks without images, or sound, run the tower on those of another."
    )

    def decisions(self, question: Question) -> Iterator[Decision]:
        yield from _decisions(self, question)

    PHASE: ClassVar = Phase.INPUTS
    WORD: ClassVar = "towers"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)

    def runs(self, parameter: str) -> bool:
        """Whether a parameter of that name is one of the tower's."""
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
class DivideImages(Op):
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

    SCRIPT: ClassVar = ScriptFunction(
        "divide_images", "Each rank of an axis runs the tower on some of the images."
    )

    def decisions(self, question: Question) -> Iterator[Decision]:
        yield from _decisions(self, question)

    def uncounted_traffic(self, step: StepFacts) -> str:
        return f"how many features each image has, 8 bytes an image over {self.axis}"

    PHASE: ClassVar = Phase.INPUTS
    WORD: ClassVar = "images"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules", "tower", "axis")

    def runs(self, name: str) -> bool:
        """Whether a module or a parameter of that name is the tower's."""
        return any(name == part or below(name, part) for part in self.tower)

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


def _decisions(op: ShareTower | DivideImages, question: Question) -> Iterator[Decision]:
    """The decision about the tower, and about the module that puts its features among tokens."""
    if op.modules.has(question.name) or op.runs(question.name):
        yield Decision(op.headline(question.mesh), str(op.modules))
