"""Python source, laid out as a formatter would.

What does not fit on a line is split into one item per line with a trailing comma, which formatters
keep at any line length.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterator
from dataclasses import dataclass, replace

WIDTH = 88  # the default of ruff and black


@dataclass(frozen=True, slots=True)
class Bracketed:
    """A bracketed expression that can be split over lines: a call, a list, a dictionary.

    Args:
        head: the text before the items, with the opening bracket.
        items: in order.
        notes: a comment for each item; a group with notes is always split.
        comma: the separator after each item.
        single: the text after a single item on one line: a tuple's comma.
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


Source = str | Bracketed


def lay(source: Source, indent: str = "", *, note: str = "", end: str = "") -> Iterator[str]:
    """The lines of source; a comment follows the code, or stands above a line that is too long.

    Args:
        source: a statement, or an item of one.
        indent: of each line.
        note: the comment's text, or nothing.
        end: a comma, for an item.
    """
    flat = f"{indent}{source}{end}"
    broken = isinstance(source, Bracketed) and source.items and (source.notes or len(flat) > WIDTH)
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


def prepend(head: str, source: Source) -> Source:
    return (
        replace(source, head=head + source.head) if isinstance(source, Bracketed) else head + source
    )


def remark(text: str) -> str:
    """The text of a comment; unprintable characters become `?`, so that it stays on one line."""
    return "".join(c if c.isprintable() else "?" for c in text)


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def literal(value: float | str | None) -> str:
    """A number, a boolean, None or a string; a string with backslashes is raw."""
    if not isinstance(value, str):
        return repr(value)
    raw = "\\" in value and value.isprintable() and not value.endswith("\\") and '"' not in value
    return f'r"{value}"' if raw else quote(value)


def attribute(name: str) -> bool:
    """Whether `module.name` is valid Python."""
    return name.isidentifier() and not keyword.iskeyword(name)
