"""A vision tower that data ranks run together, whether or not their batches have images."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planc.model.facts import Modules, below
from planc.model.module_table import LANGUAGE_MODEL
from planc.ops import phrases
from planc.ops.base import Axes, AxisSizes, Op
from planc.ops.call import MODEL, Context, Each, FunctionCall, MeshOf, ScriptFunction, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTower(Op):
    """Makes data ranks without images run the tower on an image of another rank.

    Args:
        modules: the module whose code puts features of images among the embeddings of tokens.
        axes: whose ranks read different data.
    """

    modules: Modules
    axes: Axes

    SCRIPT: ClassVar = ScriptFunction(
        "share_tower", "Ranks without images run the tower on one of another rank."
    )
    WORD: ClassVar = "towers"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)

    def runs(self, parameter: str) -> bool:
        """Whether a parameter of that name is one of the tower's."""
        inside = (name for name in self.modules.names() if below(parameter, name))
        return any(not below(parameter, f"{name}.{LANGUAGE_MODEL}") for name in inside)

    def calls(self, _context: Context) -> Iterator[Step]:
        given = (MeshOf(self.axes), MODEL)
        call = FunctionCall("standalone.towers:tower_on_all_ranks", given)
        yield Each(modules=self.modules, calls=(call,))

    def headline(self, mesh: AxisSizes | None = None) -> str:
        return f"run on all ranks of {phrases.axes(self.axes, mesh)}, where some have images"
