"""One line of a source with the labels that point into it, drawn on a grid of terminal cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planc.diagnostic import Label
from planc.report.cells import cells
from planc.report.colour import Segment
from planc.source import Source

_ELLIPSIS = "\u2026"
_MARGIN = 4
_NARROW = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A label on a line: the half-open range of cells that it underlines, and its text."""

    start: int
    end: int
    text: str
    style: str
    primary: bool

    def moved(self, left: int, right: int) -> Mark:
        """The mark in a window of the line that starts at cell `left`."""
        start = min(max(self.start, left), right - 1)
        end = max(start + 1, min(self.end, right))
        return Mark(
            start=start - left,
            end=end - left,
            text=self.text,
            style=self.style,
            primary=self.primary,
        )


@dataclass(slots=True)
class _Canvas:
    """Rows of cells; a wide character takes two, the second of them empty."""

    rows: list[dict[int, Segment]] = field(default_factory=list)

    def put(self, row: int, column: int, text: str, style: str = "") -> None:
        while len(self.rows) <= row:
            self.rows.append({})
        line = self.rows[row]
        for shown, size in cells(text):
            if size == 0:
                last = max(column - 1, 0)
                while last > 0 and line.get(last, ("x", ""))[0] == "":
                    last -= 1
                before = line.get(last, (" ", style))
                line[last] = (before[0] + shown, before[1])
                continue
            line[column] = (shown, style)
            for extra in range(1, size):
                line[column + extra] = ("", style)
            column += size

    def segments(self) -> list[list[Segment]]:
        return [self._merged(row) for row in self.rows]

    @staticmethod
    def _merged(row: dict[int, Segment]) -> list[Segment]:
        out: list[Segment] = []
        for column in range(max(row, default=-1) + 1):
            text, style = row.get(column, (" ", ""))
            if out and out[-1][1] == style:
                out[-1] = (out[-1][0] + text, style)
            else:
                out.append((text, style))
        return out


def mark(label: Label, *, style: str, primary: bool) -> Mark:
    """Where a label is on its first line; one that goes on over more lines ends with the first."""
    span = label.span
    text = line_of(span.source, span.line)
    lead = len(text) - len(span.source.line(span.line))
    first = min(span.column - 1 + lead, len(text))
    last = first + span.end - span.start
    if last > len(text):
        last = len(text.rstrip())
    start = sum(size for _, size in cells(text[:first]))
    end = start + sum(size for _, size in cells(text[first:last]))
    return Mark(start=start, end=max(end, start + 1), text=label.text, style=style, primary=primary)


def line_of(source: Source, number: int) -> str:
    """A line as it is shown: of an argument, the way it was written on the command line."""
    if source.argument and source.name.endswith(source.text):
        return source.name
    return source.line(number)


def drawn(text: str, marks: Sequence[Mark], room: int) -> list[list[list[Segment]]]:
    """The line and what is written below it, within `room` cells.

    Marks of a long line that do not fit into one window give the line once for each window; the
    result has one list of rows for each, the source line first.
    """
    shown = cells(text)
    total = sum(size for _, size in shown)
    if total <= room:
        return [_window(shown, 0, total, total, marks, room)]
    out = []
    for group in _groups(marks, room - 2 * _MARGIN):
        low = min(m.start for m in group)
        high = min(max(m.end for m in group), low + room - 2 * _MARGIN)
        left = max(0, min(low - (room - (high - low)) // 2, total - room))
        out.append(_window(shown, left, left + room, total, group, room))
    return out or [_window(shown, 0, room, total, (), room)]


def _groups(marks: Sequence[Mark], reach: int) -> list[list[Mark]]:
    """The marks from left to right, those together that fit into one window."""
    out: list[list[Mark]] = []
    for one in sorted(marks, key=lambda m: m.start):
        if out and one.end - out[-1][0].start <= reach:
            out[-1].append(one)
        else:
            out.append([one])
    return out


def _window(
    shown: list[tuple[str, int]],
    left: int,
    right: int,
    total: int,
    marks: Sequence[Mark],
    room: int,
) -> list[list[Segment]]:
    canvas = _Canvas([{}])
    low = left + 1 if left else 0
    high = right - 1 if right < total else right
    at = 0
    for char, size in shown:
        if at >= low and at + size <= high:
            _put_raw(canvas, at - left, char, size)
        at += size
    if left:
        canvas.put(0, 0, _ELLIPSIS, "gutter")
    if right < total:
        canvas.put(0, right - left - 1, _ELLIPSIS, "gutter")
    # a mark may point behind the last character: at the end of a line
    end = high if right < total else max(high, *(m.end for m in marks), 0) if marks else high
    moved = [
        m.moved(left, end) if not left else _inside(m.moved(left, end), low - left) for m in marks
    ]
    _underline(canvas, moved)
    _write(canvas, moved, room)
    return canvas.segments()


def _inside(one: Mark, low: int) -> Mark:
    return (
        one.moved(0, one.end)
        if one.start >= low
        else Mark(
            start=low,
            end=max(one.end, low + 1),
            text=one.text,
            style=one.style,
            primary=one.primary,
        )
    )


def _put_raw(canvas: _Canvas, column: int, char: str, size: int) -> None:
    """A character of the source that is already in its visible form."""
    row = canvas.rows[0]
    if size == 0:
        return canvas.put(0, column, char)
    row[column] = (char, "")
    for extra in range(1, size):
        row[column + extra] = ("", "")
    return None
