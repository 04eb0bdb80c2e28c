"""Findings as a JSON document; its schema is `grammars/diagnostics.schema.json`."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from planc.diagnostics.diagnostic import Diagnostic, Label
from planc.diagnostics.sorting import counts, sorted_findings
from planc.diagnostics.source import Source

FORMAT = 1
"""Raised when a field is removed or changes its meaning; not for a new field."""


def document(diagnostics: Iterable[Diagnostic]) -> dict[str, Any]:
    """The findings as plain data, in the order of the other formats."""
    ordered = sorted_findings(diagnostics)
    return {"format_version": FORMAT, "diagnostics": findings(ordered), "counts": counts(ordered)}


def findings(diagnostics: Iterable[Diagnostic]) -> list[dict[str, Any]]:
    """Each finding as plain data, in the order of the other formats."""
    return [
        {
            "code": diagnostic.code,
            "severity": diagnostic.severity.value,
            "message": diagnostic.message,
            "labels": [_label(label) for label in diagnostic.labels],
            "facts": list(diagnostic.facts),
            "help": diagnostic.help,
            **_edit(diagnostic),
        }
        for diagnostic in sorted_findings(diagnostics)
    ]


def render(diagnostics: Iterable[Diagnostic], also: Mapping[str, Any] | None = None) -> str:
    """The document as ASCII text, which any terminal and codec can handle."""
    return json.dumps({**document(diagnostics), **(also or {})}, indent=2) + "\n"


def _edit(diagnostic: Diagnostic) -> dict[str, Any]:
    if diagnostic.edit is None:
        return {}
    span, text = diagnostic.edit
    return {"edit": _label(Label(span=span, text=text))}


def _label(label: Label) -> dict[str, Any]:
    span = label.span
    source = span.source
    if not source.name:
        return {"file": None, "argument": None, "start": None, "end": None, "text": label.text}
    return {
        "file": None if source.argument else source.name,
        "argument": source.name if source.argument else None,
        "start": _position(source, span.start),
        "end": _position(source, span.end),
        "text": label.text,
    }


def _position(source: Source, offset: int) -> dict[str, int]:
    line, column = source.position(offset)
    return {"line": line, "column": column, "offset": offset}
