"""Pieces of Python source, laid out as a formatter would.

What does not fit on a line is broken with one item a line and a comma after the last, which
formatters leave as it is whatever their line length.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterator
from dataclasses import dataclass, replace

WIDTH = 88  # the default of ruff and black


@dataclass(frozen=True, slots=True)
class Group:
    """Something in brackets that can be broken over lines: a call, a list, a dictionary.

    Args:
        head: what stands before the items, with the opening bracket.
        items: in order.
        close: the closing bracket.
        notes: a comment for each item; a group with notes is broken always.
        comma: what follows each item.
        single: what follows an only item on the line of its brackets: a tuple's comma.
    """

    head: str
    items: tuple[Source, ...]
    close: str = ")"
    notes: tuple[str, ...] = ()
    comma: str = ","
    single: str = ""

    def __str__(self) -> str:
        inner = f"{self.comma} ".join(str(i) for i in self.items)
        return f"{self.head}{inner}{self.single if len(self.items) == 1 else ''}{self.close}"


Source = str | Group


def lay(source: Source, indent: str = "", *, note: str = "", end: str = "") -> Iterator[str]:
    """Lines of source, a comment behind them or, where that is too far right, above them.

    Args:
        source: a statement or an item of one.
        indent: what stands before each line.
        note: the comment's text, or nothing.
        end: a comma, for an item.
    """
    flat = f"{indent}{source}{end}"
    broken = isinstance(source, Group) and source.items and (source.notes or len(flat) > WIDTH)
    beside = f"{flat}  # {note}" if note else flat
    if len(beside) <= WIDTH and not broken:
        yield beside
        return
    if note:
        yield f"{indent}# {note}"
    if not broken or isinstance(source, str):
        yield flat
        return
    yield f"{indent}{source.head}"
    for item, about in zip(source.items, source.notes or ("",) * len(source.items), strict=True):
        yield from lay(item, f"{indent}    ", note=about, end=source.comma)
    yield f"{indent}{source.close}{end}"


def headed(head: str, source: Source) -> Source:
    """Source with something before it."""
    return replace(source, head=head + source.head) if isinstance(source, Group) else head + source


def remark(text: str) -> str:
    """The text of a comment, on one line whatever it was."""
    return "".join(c if c.isprintable() else "?" for c in text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def literal(value: float | str | None) -> str:
    """A number, a truth value, None or a text; a regular expression with its backslashes bare."""
    if not isinstance(value, str):
        return repr(value)
    raw = "\\" in value and value.isprintable() and not value.endswith("\\") and '"' not in value
    return f'r"{value}"' if raw else quoted(value)


def attribute(name: str) -> bool:
    """Whether `module.name` is Python."""
    return name.isidentifier() and not keyword.iskeyword(name)
