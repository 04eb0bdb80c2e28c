"""The decisions of operations about a module, as `planc why` explains them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from planc.model.facts import Modules
from planc.ops.phrases import AxisSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The module, or the parameter of it, that a person asks about.

    Args:
        at: the module.
        parameter: its name in the module; None for the module itself.
        mesh: the sizes of axes, for texts.
    """

    at: Modules
    parameter: str | None
    mesh: AxisSizes

    @property
    def name(self) -> str:
        """The torch name of the module."""
        return self.at.first_name

    def ancestor(self, length: int) -> str:
        """The name of the module, or of the one around it, whose path has this length."""
        return Modules(self.at.path[:length], self.at.module).first_name


class Decision(NamedTuple):
    """A text, and the name of the modules that it is about."""

    text: str
    target: str


def decision_on(modules: Modules, text: str, question: Question) -> Iterator[Decision]:
    """Yields a decision about the modules of a set alone."""
    if modules.has(question.name):
        yield Decision(text, question.name)


def decision_around(modules: Modules, text: str, question: Question) -> Iterator[Decision]:
    """Yields a decision about the modules of a set and all that is inside of them; about a module
    around them, it is a decision on a part.
    """
    if question.at.part_inside(modules) is not None:
        yield Decision(text, question.ancestor(len(modules.path)))
    elif question.parameter is None and (both := modules.part_inside(question.at)) is not None:
        yield Decision(text, str(both))
