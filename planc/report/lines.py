"""Diagnostics one a line: for editors and grep, and as GitHub's workflow commands."""

from __future__ import annotations

from collections.abc import Sequence

from planc.diagnostic import Diagnostic, Severity
from planc.report.colour import visible

_COMMAND = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def concise(diagnostics: Sequence[Diagnostic]) -> str:
    """`path:line:column: error[PL203]: message`."""
    return "".join(
        f"{_place(d)}{d.severity}[{d.code}]: {visible(d.message)}\n" for d in diagnostics
    )


def _place(diagnostic: Diagnostic) -> str:
    if not diagnostic.labels or not diagnostic.labels[0].span.source.name:
        return ""
    span = diagnostic.labels[0].span
    name = visible(span.source.name)
    return f"{name}: " if span.source.argument else f"{name}:{span.line}:{span.column}: "


def github(diagnostics: Sequence[Diagnostic]) -> str:
    """Workflow commands, which GitHub shows at the lines of a pull request.

    Source: docs.github.com, "Workflow commands for GitHub Actions", and its toolkit's escapes.
    """
    return "".join(_command(d) for d in diagnostics)


def _command(diagnostic: Diagnostic) -> str:
    properties = {"title": f"planc {diagnostic.code}"}
    if diagnostic.labels and not diagnostic.labels[0].span.source.argument:
        span = diagnostic.labels[0].span
        end_line, end_column = span.source.position(span.end)
        properties["file"] = span.source.name
        properties["line"] = str(span.line)
        properties["endLine"] = str(end_line)
        properties["col"] = str(span.column)
        if end_line == span.line:
            properties["endColumn"] = str(end_column)
    message = diagnostic.message
    for text in (*diagnostic.facts, *([f"help: {diagnostic.help}"] if diagnostic.help else [])):
        message += f"\n{text}"
    fields = ",".join(f"{k}={_property(v)}" for k, v in properties.items())
    return f"::{_COMMAND[diagnostic.severity]} {fields}::{_data(message)}\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
