"""Diagnostics with the lines that they speak of, for a person."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

from planc.diagnostic import Diagnostic, Label, Severity
from planc.report.colour import BLUE, BOLD, CYAN, RED, YELLOW, paint, visible
from planc.source import Source

_HEAD = {Severity.ERROR: RED, Severity.WARNING: YELLOW, Severity.INFO: CYAN}
_WIDEST = 160


def render(diagnostics: Sequence[Diagnostic], *, colour: bool, width: int) -> str:
    """Each diagnostic as a block, an empty line after it."""
    return "".join("\n".join(_block(d, colour, width)) + "\n\n" for d in diagnostics)


def _block(diagnostic: Diagnostic, colour: bool, width: int) -> Iterator[str]:
    head = paint(f"{diagnostic.severity}[{diagnostic.code}]", _HEAD[diagnostic.severity], colour)
    yield f"{head}{paint(': ' + visible(diagnostic.message), BOLD, colour)}"
    shown = [label for label in diagnostic.labels if label.span.source.name]
    gutter = max((len(str(label.span.line)) for label in shown), default=1)
    sources = list(dict.fromkeys(label.span.source for label in shown))
    for i, source in enumerate(sources):
        own = [label for label in shown if label.span.source is source]
        bar, arrow = paint("|", BLUE, colour), paint("-->" if i == 0 else ":::", BLUE, colour)
        main = shown[0] if shown[0] in own else own[0]
        place = visible(source.name)
        if not source.argument:
            place += f":{main.span.line}:{main.span.column}"
        yield f"{' ' * gutter}{arrow} {place}"
        yield f"{' ' * gutter} {bar}"
        yield from _excerpt(own, shown[0], gutter, colour)
    if shown and (diagnostic.facts or diagnostic.help):
        yield f"{' ' * gutter} {paint('|', BLUE, colour)}"
    for word, text in [("fact", f) for f in diagnostic.facts] + [("help", diagnostic.help)]:
        if text:
            yield from _note(word, visible(text), gutter, colour, width)


def _note(word: str, text: str, gutter: int, colour: bool, width: int) -> Iterator[str]:
    mark = paint("=", BLUE, colour)
    indent = f"{' ' * gutter}   {' ' * len(word)}  "
    lines = textwrap.wrap(text, max(30, width - len(indent)), break_on_hyphens=False) or [""]
    yield f"{' ' * gutter} {mark} {paint(word + ':', BOLD, colour)} {lines[0]}"
    yield from (f"{indent}{line}" for line in lines[1:])


def _excerpt(labels: list[Label], first: Label, gutter: int, colour: bool) -> Iterator[str]:
    """The lines of one source that the labels are in, each label under its line."""
    source = labels[0].span.source
    bar = paint("|", BLUE, colour)
    before = 0
    for number in sorted({label.span.line for label in labels}):
        if before and number > before + 1:
            dots = "..." if number > before + 2 else None
            if dots:
                yield paint(dots, BLUE, colour)
            else:
                yield _line(source, before + 1, gutter, bar, colour)
        yield _line(source, number, gutter, bar, colour)
        own = [label for label in labels if label.span.line == number]
        for label in sorted(own, key=lambda label: label.span.start):
            primary = label is first
            code = RED if primary else BLUE
            indent, marks = _marks(source, label, "^" if primary else "-")
            mark = paint(f"{marks} {visible(label.text)}".rstrip(), code, colour)
            yield f"{' ' * gutter} {bar} {indent}{mark}"
        before = number


def _line(source: Source, number: int, gutter: int, bar: str, colour: bool) -> str:
    text = visible(source.line(number)).rstrip()
    if len(text) > _WIDEST:
        text = text[: _WIDEST - 3] + "..."
    return f"{paint(str(number).rjust(gutter), BLUE, colour)} {bar} {text}".rstrip()


def _marks(source: Source, label: Label, sign: str) -> tuple[str, str]:
    """The space before a label's marks, and the marks, in columns of the terminal."""
    span = label.span
    line = source.line(span.line)
    start = span.column - 1
    end = min(len(line.rstrip()), start + max(1, span.end - span.start))
    indent = columns(visible(line[:start]))
    length = max(1, columns(visible(line[start:end])))
    if indent > _WIDEST:
        return " " * (_WIDEST - 3), sign
    return " " * indent, sign * min(length, _WIDEST - indent)


def columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    total = 0
    for char in text:
        if unicodedata.combining(char):
            continue
        total += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return total
