"""Findings as GitHub workflow commands, which annotate the lines of a pull request.

Source of the escapes: actions/toolkit, packages/core/src/command.ts.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from planc.diagnostics import sorting
from planc.diagnostics.diagnostic import Diagnostic, Severity
from planc.diagnostics.source import Span
from planc.diagnostics.terminal_width import visible_lines

_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}


def render(diagnostics: Iterable[Diagnostic]) -> str:
    """One command per finding; its message contains the other labels, the facts and the help."""
    return "".join(f"{_command(finding)}\n" for finding in sorting.sorted_findings(diagnostics))


def _command(diagnostic: Diagnostic) -> str:
    properties = {**_place(sorting.primary_span(diagnostic)), "title": diagnostic.code}
    listed = ",".join(f"{name}={_escape(value, _PROPERTY)}" for name, value in properties.items())
    message = _escape(_message(diagnostic), _DATA)
    return f"::{_LEVELS[diagnostic.severity]} {listed}::{message}"


def _place(span: Span | None) -> dict[str, str]:
    """The location of the annotation; empty for an argument or standard input, which are not files.

    GitHub accepts columns only for an annotation of one line.
    """
    if span is None or not sorting.is_file(span):
        return {}
    line, column = span.source.position(span.start)
    end_line, end_column = span.source.position(span.end)
    place = {"file": _in_workspace(span.source.name), "line": str(line)}
    if end_line != line:
        return {**place, "endLine": str(end_line)}
    return {**place, "col": str(column), "endColumn": str(max(end_column, column + 1))}


def _in_workspace(name: str) -> str:
    """A path as GitHub knows it: relative to the checkout, not to the folder of a step."""
    workspace = os.environ.get("GITHUB_WORKSPACE")
    if not workspace:
        return name
    path = Path(name).absolute()
    if not path.is_relative_to(Path(workspace)):
        return name
    return path.relative_to(Path(workspace)).as_posix()


def _message(diagnostic: Diagnostic) -> str:
    lines = [diagnostic.message]
    for index, label in enumerate(sorting.labels_with_source(diagnostic)):
        if label.text or index > 0 or label.span.source.argument:
            lines.append(sorting.describe_label(label))
    return "\n".join((*lines, *sorting.notes(diagnostic)))


def _escape(text: str, signs: dict[str, str]) -> str:
    return re.sub("|".join(signs), lambda m: signs[m[0]], visible_lines(text))
