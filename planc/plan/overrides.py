"""Settings: lines that set one value of a section, once unless a later line overrides it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planc.diagnostic import Label, Sink
from planc.source import Span
from planc.syntax import ast

SectionLine = ast.Setting | ast.Directive


@dataclass(slots=True)
class Settings:
    """The settings of one section.

    Args:
        sink: receives PL102 for a repeated line, PL103 for an `override` without an earlier line.
        lines: the line in force, by its name.
        values: the value read from it; None where that failed.
    """

    sink: Sink
    lines: dict[str, SectionLine] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, item: SectionLine, read: Callable[[Any], Any] = lambda item: item) -> None:
        """Adds a line and the value that `read` returns for it; an earlier one may be in force."""
        name = item.name if isinstance(item, ast.Setting) else item.call.name
        earlier = self.lines.get(name)
        if earlier is not None and not item.override:
            conflict(self.sink, "line", f"`{name}`", item.origin, earlier.origin)
            return
        if earlier is None and item.override:
            nothing_to_override(self.sink, f"`{name}`", item.origin)
        self.lines[name] = item
        self.values[name] = read(item)


def conflict(sink: Sink, word: str, what: str, origin: Span, earlier: Span) -> None:
    """PL102: two lines, or two rules, decide the same."""
    sink.error(
        "PL102",
        f"two {word}s decide {what}",
        Label(span=origin, text=f"this {word}"),
        Label(span=earlier, text="and this one"),
        help="remove one, or write `override` before the one that applies",
    )


def nothing_to_override(
    sink: Sink, what: str, origin: Span, help: str | None = "remove `override`"
) -> None:
    """PL103: an `override` without an earlier line."""
    sink.error("PL103", f"there is no earlier {what} to override", origin, help=help)
