"""Diagnostics as JSON, by `grammars/diagnostics.schema.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from planc.diagnostic import Diagnostic, Label, Severity

FORMAT_VERSION = 1


def render(diagnostics: Sequence[Diagnostic]) -> str:
    counts = {str(s): sum(d.severity is s for d in diagnostics) for s in Severity}
    body = {
        "format_version": FORMAT_VERSION,
        "counts": counts,
        "diagnostics": [_diagnostic(d) for d in diagnostics],
    }
    return json.dumps(body, indent=2) + "\n"


def _diagnostic(diagnostic: Diagnostic) -> dict[str, Any]:
    return {
        "code": diagnostic.code,
        "severity": str(diagnostic.severity),
        "message": diagnostic.message,
        "labels": [_label(label) for label in diagnostic.labels],
        "facts": list(diagnostic.facts),
        "help": diagnostic.help,
    }


def _label(label: Label) -> dict[str, Any]:
    span = label.span
    end_line, end_column = span.source.position(span.end)
    return {
        "file": span.source.name,
        "line": span.line,
        "column": span.column,
        "end_line": end_line,
        "end_column": end_column,
        "offset": span.start,
        "end_offset": span.end,
        "text": label.text,
    }
