"""The sections of the language that are folders, and the hooks by which stages ask them.

A section's folder has all that follows from it, in a part for each stage. Stages name no section: a
stage declares a hook next to the loop that asks it, and asks the sections of the plan. A section
answers by a function, or a value, of that name in its part, which is imported when the first plan
uses the section. Other plans import only the declaration. A section without lines follows from the
model, or from actions of an adapters section: stages ask it for all plans.

To add a section, add its folder, and its name to `NAMES`. The folder of a backend of `fsdp` has
the same parts; its class is asked for the others (`planc.ops.backend`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

PARTS = {
    "section": "reads the section into rules",
    "ops": "its operations",
    "infer": "plan -> plan: what follows from its rules",
    "checks": "rules -> findings",
    "lowering": "rules -> operations; their collectives and bytes",
    "standalone": "functions that emitted scripts inline; imports nothing of planc",
    "runtime": "what `apply` requires of the device and the model; what the reference run has too",
    "choice": "rules -> rules, from the calls that one rank makes",
    "provenance": "what `planc why` adds",
    "proof": "its verdicts in the layout flow; reports of its separate simulation",
    "estimate": "time and memory of a step",
}
"""The modules of a section's folder, in the order of the stages."""

Answer = TypeVar("Answer")


class Hook(Generic[Answer]):
    """A function, or a value, that sections may have.

    Args:
        part: of `PARTS`.
        name: in the part.
    """

    def __init__(self, part: str, name: str) -> None:
        assert part in PARTS
        self.part, self.name = part, name

    def find(self, section: str) -> Answer | None:
        """The answer of a section; None if it has none, or for an empty name."""
        answer: Answer | None = getattr(_part(section, self.part), self.name, None)
        return answer

    def find_all(self, sections: Iterable[str]) -> Iterator[Answer]:
        """The answers of sections that have one, in order."""
        answers = map(self.find, sections)
        return (answer for answer in answers if answer is not None)


@cache
def _part(section: str, name: str) -> Any:
    """A part of a section; None if it has none."""
    path = f"{__name__}.{section}.{name}"
    return import_module(path) if section and find_spec(path) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionDeclaration:
    """A section, as its folder declares it; all that is imported for every plan.

    Args:
        example: a rule of the section, for messages; empty for a section without lines.
        codes: its diagnostics, as rows of `planc.diagnostics.codes`.
        adapters: its actions of an adapters section, with their arguments besides those of `lora`.
        real_sizes: the codes that belong to `planc.diagnostics.codes.REAL_SIZES`.
        sized: whether its head names an engine and its sizes (`ENGINE_SIZES`). A plan of such
            sections alone needs no mesh: its ranks are those of the engine.
        other_words: words of other libraries, by what a plan says instead.
    """

    example: str = ""
    codes: tuple[tuple[str, str, Any, str], ...] = ()
    adapters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    real_sizes: tuple[str, ...] = ()
    sized: bool = False
    other_words: Mapping[str, str] = field(default_factory=dict)


FOLDER = Path(__file__).parent
NAMES = (
    "quantization",
    "matmul",
    "train",
    "checkpoint",
    "compile",
    "loss",
    "serve",
    "documents",
    "images",
    "draws",
)  # fmt: skip
BACKENDS = {"megatron": "megatron_fsdp"}
"""By the word of `backend = WORD` in an fsdp section, the folder of a backend."""
SECTIONS: dict[str, SectionDeclaration] = {
    name: import_module(f"{__name__}.{name}").DECLARATION for name in NAMES
}
STATED = tuple(name for name in NAMES if SECTIONS[name].example)
"""The sections that have lines in plans."""
IMPLIED = tuple(name for name in NAMES if name not in STATED)
"""The sections without lines, which all plans use."""


def is_sized(name: str) -> bool:
    """Whether a section's head names an engine and its sizes."""
    return name in SECTIONS and SECTIONS[name].sized
