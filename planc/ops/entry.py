"""The unit of comparison of a diff: what an operation states about a set of modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from planc.model.facts import Modules

Group = frozenset[str]
"""The paths of the members of a group (one FSDP unit)."""

Value = str | int | float | bool | tuple[int, ...] | tuple[str, ...] | None
Words = Mapping[str, tuple[str, Callable[[Any], str]]]
"""By the name of a field in the JSON: its name in a diff, and the text of a value."""


class Fact(NamedTuple):
    """A statement with its name in the lowered JSON; `usual` for a default that is left out."""

    name: str
    value: Value
    usual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a plan states about a set of modules.

    Args:
        kind: one of `planc.diffing.entries.KINDS`.
        over: the axes of a tensor-parallel style.
        label: the subject, where that is not a set of modules.
        modules: the set.
        style: of a tensor-parallel rule.
        facts: all other statements.
        place: the line of the `.plan` file.
        brief: the text of a diff where only one side has the entry.
        source: the operation, or the part of one, whose fields are facts too, except those in its
            `ABOUT`; None for none.
        at: its position in the plan, which only orders names.
    """

    kind: str
    over: tuple[str, ...] = ()
    label: str = ""
    modules: Modules | None = None
    style: Any = None
    facts: tuple[Fact, ...] = ()
    place: str = ""
    brief: str = field(default="", compare=False)
    source: Any = field(default=None, compare=False)
    at: int = field(default=0, compare=False)

    @property
    def subject(self) -> tuple[object, ...]:
        """Entries with the same subject are compared where their indices overlap."""
        key = None if self.modules is None else self.modules.key
        return (self.kind, self.over, self.label, key)

    @property
    def content(self) -> str:
        """All statements, strictly typed: `reshard` to 1 rank differs from `reshard = True`."""
        return repr((self.style, self.facts))

    def order(self) -> tuple[str, str]:
        """A sort key that does not depend on the order of operations."""
        return (str(self.modules), self.content)
