"""Findings as blocks for people: the message, the source lines, the facts, the help."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from planc.diagnostics.color import StyledText, paint
from planc.diagnostics.diagnostic import Diagnostic, Label, Severity
from planc.diagnostics.excerpt import Row, displayed_line, drawn_lines, mark
from planc.diagnostics.sorting import labels_with_source, sorted_findings, summary
from planc.diagnostics.source import Source, Span
from planc.diagnostics.terminal_width import visible, wrap

_NARROWEST = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The layout of one block: cells of a line number and a line, main label and its style."""

    gutter: int
    room: int
    main: Label | None
    style: str

    @property
    def bar(self) -> StyledText:
        return f"{' ' * self.gutter} | ", "gutter"


def render(diagnostics: Iterable[Diagnostic], *, color: bool, width: int) -> str:
    """The blocks, each followed by a blank line, and the summary; only locations and unbreakable
    words exceed the width, which is in terminal cells.
    """
    findings = sorted_findings(diagnostics)
    spans = [label.span for d in findings for label in labels_with_source(d)]
    numbers = [span.line for span in spans if not span.source.argument]
    gutter = len(str(max(numbers, default=1)))
    lines: list[str] = []
    for diagnostic in findings:
        rows = _block(diagnostic, gutter, max(width, _NARROWEST))
        lines += [paint(row, color) for row in rows]
        lines.append("")
    worst = next((s for s in Severity if any(d.severity is s for d in findings)), None)
    lines.append(paint([(summary(findings), worst.value if worst else "bold")], color))
    return "\n".join(lines) + "\n"


def _block(diagnostic: Diagnostic, gutter: int, room: int) -> list[Row]:
    labels = labels_with_source(diagnostic)
    main = labels[0] if labels else None
    frame = _Frame(gutter=gutter, room=room, main=main, style=diagnostic.severity.value)
    rows = _head(diagnostic, room)
    for index, source in enumerate({id(s): s for s in (m.span.source for m in labels)}.values()):
        source_labels = [label for label in labels if label.span.source is source]
        arrow = "-->" if index == 0 else ":::"
        rows.append([(" " * gutter + arrow, "gutter"), (" " + where(source_labels[0].span), "")])
        rows.append([frame.bar])
        rows += _lines(source, source_labels, frame)
    for fact in diagnostic.facts:
        rows += _note("fact", fact, frame)
    for label in diagnostic.labels:
        if label not in labels and label.text:
            rows += _note("note", label.text, frame)
    if diagnostic.help:
        rows += _note("help", diagnostic.help, frame)
    return rows


def _head(diagnostic: Diagnostic, room: int) -> list[Row]:
    lead = f"{diagnostic.severity.value}[{diagnostic.code}]"
    texts = wrap(diagnostic.message, room - len(lead) - 2)
    rows: list[Row] = [[(lead, diagnostic.severity.value), (f": {texts[0]}", "bold")]]
    rows += [[(" " * (len(lead) + 2), ""), (text, "bold")] for text in texts[1:]]
    return rows


def where(span: Span) -> str:
    """`path:line:col`; an argument has neither line nor column."""
    if span.source.argument:
        return "the command line"
    line, column = span.source.position(span.start)
    return f"{visible(span.source.name)}:{line}:{column}"


def _lines(source: Source, labels: Sequence[Label], frame: _Frame) -> list[Row]:
    rows: list[Row] = []
    ordered = sorted(labels, key=lambda label: label.span.line)
    before = None
    for number, group in groupby(ordered, key=lambda label: label.span.line):
        if before is not None and number == before + 2:
            rows += _excerpt(source, before + 1, (), frame)
        elif before is not None and number > before + 2:
            rows.append([("...", "gutter")])
        rows += _excerpt(source, number, tuple(group), frame)
        before = number
    return rows


def _excerpt(source: Source, number: int, labels: Sequence[Label], frame: _Frame) -> list[Row]:
    marks = []
    for label in labels:
        primary = label is frame.main
        marks.append(mark(label, style=frame.style if primary else "secondary", primary=primary))
    shown = "" if source.argument else str(number)
    rows: list[Row] = []
    for window in drawn_lines(displayed_line(source, number), marks, frame.room - frame.gutter - 3):
        rows.append([(f"{shown:>{frame.gutter}} | ", "gutter"), *window[0]])
        rows += [[frame.bar, *row] for row in window[1:]]
    return rows


def _note(kind: str, text: str, frame: _Frame) -> list[Row]:
    indent = frame.gutter + 1 + len(f"= {kind}: ")
    texts = wrap(text, frame.room - indent)
    lead = f"{' ' * frame.gutter} = "
    rows: list[Row] = [[(lead, "gutter"), (f"{kind}:", "bold"), (f" {texts[0]}", "")]]
    rows += [[(" " * indent + line, "")] for line in texts[1:]]
    return rows
