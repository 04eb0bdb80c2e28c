"""Draws one source line with the labels that point into it, on a grid of terminal cells."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

from planc.diagnostics.color import StyledText
from planc.diagnostics.diagnostic import Label
from planc.diagnostics.source import Source
from planc.diagnostics.terminal_width import cells, width, wrap

Row = list[StyledText]

_ELLIPSIS = "\u2026"
_MARGIN = 4
_NARROW = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A label on a line: the half-open range of cells that it underlines, and its text."""

    start: int
    end: int
    text: str
    style: str
    primary: bool


@dataclass(slots=True)
class _Canvas:
    """Rows of cells; the text of a wide character is in the first of its cells."""

    rows: list[dict[int, StyledText]] = field(default_factory=list)

    def put(self, row: int, column: int, text: str, style: str = "") -> None:
        self.put_cells(row, column, cells(text), style)

    def put_cells(
        self, row: int, column: int, shown: Iterable[tuple[str, int]], style: str = ""
    ) -> None:
        while len(self.rows) <= row:
            self.rows.append({})
        line = self.rows[row]
        base = column
        for text, size in shown:
            if size == 0:  # combines with the previous character
                line[base] = (line.get(base, (" ", style))[0] + text, style)
                continue
            line[column] = (text, style)
            line.update({column + extra: ("", style) for extra in range(1, size)})
            base, column = column, column + size

    def segments(self) -> list[Row]:
        return [_merge_cells(row) for row in self.rows]


def _merge_cells(row: dict[int, StyledText]) -> Row:
    filled = (row.get(column, (" ", "")) for column in range(max(row, default=-1) + 1))
    styled = groupby(filled, key=lambda cell: cell[1])
    return [("".join(text for text, _ in run), style) for style, run in styled]


def displayed_line(source: Source, number: int) -> str:
    """A line as it is displayed; an argument is displayed as written on the command line."""
    if source.argument and source.name.endswith(source.text):
        return source.name
    return source.line(number)


def mark(label: Label, *, style: str, primary: bool) -> Mark:
    """The mark of a label on its first line; a label over several lines ends with the first."""
    span = label.span
    text = displayed_line(span.source, span.line)
    lead = len(text) - len(span.source.line(span.line))  # the `--set ` of an argument
    first = min(span.column - 1 + lead, len(text))
    last = first + span.end - span.start
    if last > len(text):
        last = len(text.rstrip())
    start = sum(size for _, size in cells(text)[:first])
    end = sum(size for _, size in cells(text)[:last])
    return Mark(start=start, end=max(end, start + 1), text=label.text, style=style, primary=primary)


def drawn_lines(text: str, marks: Sequence[Mark], room: int) -> list[list[Row]]:
    """The source line and the labels below it, within `room` cells.

    A long line is cut to a window around its marks. Marks that do not fit into one window get one
    window each: the result has a list of rows per window, the source line first.
    """
    shown = cells(text)
    total = sum(size for _, size in shown)
    if total <= room:
        return [_window(shown, 0, total, marks, room)]
    reach = room - 2 * _MARGIN
    out = []
    for group in _groups(marks, reach):
        low = min(m.start for m in group)
        high = min(max(m.end for m in group), low + reach)
        left = max(0, min(low - (room - (high - low)) // 2, total - room))
        if high <= room - _MARGIN:  # prefer the beginning of the line
            left = 0
        out.append(_window(shown, left, total, group, room))
    return out or [_window(shown, 0, total, (), room)]


def _groups(marks: Sequence[Mark], reach: int) -> list[list[Mark]]:
    out: list[list[Mark]] = []
    for mark in sorted(marks, key=lambda m: m.start):
        if out and mark.end - out[-1][0].start <= reach:
            out[-1].append(mark)
        else:
            out.append([mark])
    return out


def _window(
    shown: list[tuple[str, int]], left: int, total: int, marks: Sequence[Mark], room: int
) -> list[Row]:
    """The rows of one window, which starts at cell `left` of a line of `total` cells."""
    cut = left + room < total
    low = left + 1 if left else 0
    high = left + room - 1 if cut else total
    canvas = _Canvas()
    canvas.put(0, 0, _ELLIPSIS if left else "", "gutter")
    starts = accumulate((size for _, size in shown), initial=0)
    kept = [(at, c) for at, c in zip(starts, shown, strict=False) if low <= at <= high - c[1]]
    if kept:
        canvas.put_cells(0, kept[0][0] - left, (c for _, c in kept))
    if cut:
        canvas.put(0, room - 1, _ELLIPSIS, "gutter")
    bound = high if cut else total + 1  # a mark may point past the last character
    shifted = []
    for mark in marks:
        start = min(max(mark.start, low), bound - 1)
        end = min(max(mark.end, start + 1), bound)
        shifted.append(replace(mark, start=start - left, end=end - left))
    for mark in sorted(shifted, key=lambda m: (m.primary, m.start - m.end)):
        sign = "^" if mark.primary else "-"
        canvas.put(1, mark.start, sign * (mark.end - mark.start), mark.style)
    _write(canvas, shifted, room)
    return canvas.segments()


def _write(canvas: _Canvas, marks: Sequence[Mark], room: int) -> None:
    """Writes the label texts: the rightmost beside its underline if it fits, the others below."""
    waiting = sorted((m for m in marks if m.text), key=lambda m: (m.start, m.primary))
    if not waiting:
        return
    last, rightmost = waiting[-1], max(m.end for m in marks)
    if last.end == rightmost and last.end + 1 + width(last.text) <= room:
        canvas.put(1, last.end + 1, last.text, last.style)
        waiting.pop()
    if not waiting:
        return
    row = 2
    _stems(canvas, row, waiting)
    while waiting:
        mark = waiting.pop()
        size = max(min(width(mark.text), room), 1)
        column = mark.start
        if room - column < min(size, _NARROW):
            column = max(0, room - size)
        for line in wrap(mark.text, room - column):
            row += 1
            _stems(canvas, row, [m for m in waiting if m.start < column - 1])
            canvas.put(row, column, line, mark.style)


def _stems(canvas: _Canvas, row: int, marks: Iterable[Mark]) -> None:
    for mark in marks:
        canvas.put(row, mark.start, "|", mark.style)
