"""Lowered plans, diffs and reasons on a terminal: in color, and folded to its width.

Anywhere else the text is printed as it is, to the byte; `FORCE_COLOR` adds the colors alone.
"""

import os
import re
import sys
from collections.abc import Iterator

from planc.diagnostics.color import StyledText, paint, wants_color

_CELL = re.compile(r"\S+(?:(?: |(?<=[,x:]) {2,})\S+)*")  # `31 x  6.5 MiB per rank,  52.0 MiB`
_PART = r"(?:\[[^\]]*\]|\((?:[^()]|\([^()]*\))*\)|\S)+"  # brackets are whole
_WORD = re.compile(f"{_PART}(?: = {_PART})?")
_STYLED = re.compile(
    r"(?P<bold>^[a-z]\S*(?: [a-z]+)?(?= {2,}))"
    r"|(?P<changed>^  ~ \S+(?: \S+)*)|(?P<added>^  \+ \S+(?: \S+)*)|(?P<removed>^  - \S+(?: \S+)*)"
    r"|(?P<code>(?<!\S)\[\d[\d, ]*\])"
    r"|(?P<secondary>[^\s(]+\.plan:\d+)"
)


def show(text: str, *, titled: bool = False) -> None:
    """Prints a text; `titled` says that its first line is a title."""
    color, terminal = wants_color(sys.stdout, os.environ), sys.stdout.isatty()
    if not color and not terminal:
        sys.stdout.write(text)
        return
    import shutil

    width = shutil.get_terminal_size((100, 24)).columns if terminal else 0
    for i, line in enumerate(text.splitlines()):
        rows = fold_line(line, width) if width else [line]
        for row in rows:
            title = titled and i == 0 and row is rows[0]
            print(paint(_title(row) if title else _split_styles(row), color))


def fold_line(line: str, width: int) -> list[str]:
    """A line in rows of at most `width` characters, if its words allow it.

    A column that does not fit starts a row of its own, and only a text in the second column, which
    is prose, continues below itself. Names and shapes are never torn.
    """
    if len(line) <= width:
        return [line]
    cells = [(match.start(), match[0]) for match in _CELL.finditer(line)]
    second = cells[1][0] if len(cells) > 1 else width
    hang = second if second <= width // 4 else cells[0][0] + 4
    rows: list[str] = []
    row = ""
    for start, cell in cells:
        at = row.ljust(start) if not rows else f"{row}  " if row.strip() else row
        if len(at) + len(cell) > width and start != hang and row.strip():
            rows.append(row)
            at = " " * hang
        row = at
        whole = (w if len(w) <= width - hang else w.split() for w in _WORD.findall(cell))
        words = (part for each in whole for part in ([each] if isinstance(each, str) else each))
        for i, word in enumerate(words):
            space = " " if i else ""
            if i and len(row) + 1 + len(word) > width:
                rows.append(row)
                row, space = " " * hang, ""
            row += space + word
    return [*rows, row]


def _title(row: str) -> Iterator[StyledText]:
    first = _CELL.match(row)
    end = first.end() if first else 0
    yield row[:end], "bold"
    yield row[end:], ""


def _split_styles(row: str) -> Iterator[StyledText]:
    end = 0
    for styled in _STYLED.finditer(row):
        yield row[end : styled.start()], ""
        yield styled[0], styled.lastgroup or ""
        end = styled.end()
    yield row[end:], ""
