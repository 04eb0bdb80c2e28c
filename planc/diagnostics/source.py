"""Source text and the spans that point into it.

Every node of every stage carries a `Span`, so a diagnostic can always show the line that caused it.
Offsets count code points of the text, columns are 1-based code points; a consumer that counts
otherwise (an editor counts UTF-16 units) converts from these at its own edge.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

MAX_CHARACTERS = 1_000_000
"""The longest text that is read as a plan."""


@dataclass(frozen=True, eq=False)
class Source:
    """A text with the name a user knows it by: a path, `<stdin>`, `REV:path`, or `--set tp=8`.

    An `argument` is a text from the command line, which has no line numbers.
    """

    name: str
    text: str
    argument: bool = False

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def position(self, offset: int) -> tuple[int, int]:
        """The 1-based line and column of an offset; past the end means the end."""
        offset = max(0, min(offset, len(self.text)))
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a 1-based line, without its newline."""
        start = self._starts[number - 1]
        end = self._starts[number] - 1 if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r")

    def offset(self, line: int) -> int:
        """The offset at which a 1-based line starts."""
        return self._starts[line - 1]

    def span(self, start: int, end: int) -> Span:
        return Span(source=self, start=start, end=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The half-open range [start, end) of a source."""

    source: Source
    start: int
    end: int

    @property
    def line(self) -> int:
        return self.source.position(self.start)[0]

    @property
    def column(self) -> int:
        return self.source.position(self.start)[1]

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def place(self) -> str:
        """`name:line`, the form that lowered plans and diffs quote."""
        if self.source.argument:
            return self.source.name
        return f"{self.source.name}:{self.line}"

    @staticmethod
    def from_place(place: str) -> Span:
        """A span that knows its place alone, as one that was read back from JSON does."""
        return Source(place, "", argument=True).span(0, 0)

    @staticmethod
    def parse_place(place: str) -> tuple[str, int]:
        """The name and the line of a `place`, which is all that a lowered document keeps of a span.

        The line is 0 for an argument and for the empty place of what no one wrote.
        """
        name, _, line = place.rpartition(":")
        return (name, int(line)) if line.isdecimal() else (place, 0)

    def has(self, other: Span) -> bool:
        """Whether another span is inside this one."""
        return self.source is other.source and self.start <= other.start and other.end <= self.end


NOWHERE = Span.from_place("")
"""The origin of what no line asked for."""
