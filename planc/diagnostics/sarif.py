"""Findings as SARIF 2.1.0, for code scanners and editors.

Source: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html; the numbers in this file
are its sections.
"""

import json
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from planc.diagnostics.codes import CODES
from planc.diagnostics.diagnostic import Diagnostic, Label, Severity
from planc.diagnostics.explain import explain
from planc.diagnostics.sorting import (
    describe_label,
    is_file,
    labels_with_source,
    notes,
    sorted_findings,
)
from planc.diagnostics.terminal_width import visible_lines
from planc.files.version import VERSION

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def render(diagnostics: Iterable[Diagnostic]) -> str:
    """One run in ASCII, with a result per finding and a rule per code."""
    findings = sorted_findings(diagnostics)
    codes = sorted({d.code for d in findings})
    run = {
        "tool": {"driver": {"name": "planc", "version": VERSION, "rules": _rules(codes)}},
        "columnKind": "unicodeCodePoints",  # 3.14.17
        "results": [_result(d, codes.index(d.code)) for d in findings],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rules(codes: Iterable[str]) -> list[dict[str, Any]]:
    """The `reportingDescriptor` of each code (3.49), with the text of its page."""
    rules = []
    for code in codes:
        title = CODES[code].title
        body = (explain(code) or "").partition("\n")[2].strip() or title
        help = {"text": body, "markdown": body}
        rules.append({"id": code, "shortDescription": {"text": title}, "help": help})
    return rules


def _result(diagnostic: Diagnostic, rule: int) -> dict[str, Any]:
    labels = labels_with_source(diagnostic)
    files = [label for label in labels if is_file(label.span)]
    # an argument or standard input is not an artifact
    lines = [diagnostic.message, *(describe_label(label) for label in labels if label not in files)]
    result: dict[str, Any] = {
        "ruleId": diagnostic.code,
        "ruleIndex": rule,
        "level": _LEVELS[diagnostic.severity],
        "message": {"text": visible_lines("\n".join((*lines, *notes(diagnostic))))},
    }
    if files:
        result["locations"] = [_location(files[0])]
    if files[1:]:
        result["relatedLocations"] = [_location(label) for label in files[1:]]
    return result


def _location(label: Label) -> dict[str, Any]:
    """The `location` of a label (3.28). A region ends after its last character; it is not empty."""
    source = label.span.source
    line, column = source.position(label.span.start)
    end_line, end = source.position(label.span.end)
    region = {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end}
    if (line, column) == (end_line, end):
        region["endColumn"] = end + 1
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": {"uri": _uri(source.name)}, "region": region}
    }
    if label.text:
        location["message"] = {"text": visible_lines(label.text)}
    return location


def _uri(name: str) -> str:
    """3.10: a colon in a relative reference, as in `HEAD:a.plan`, would make it a scheme."""
    path = quote(PurePath(name).as_posix(), errors="surrogatepass")
    return f"file://{path}" if path.startswith("/") else path
