"""Renders findings for people, editors, programs and GitHub.

`full` is for people, `concise` has one line per finding, `json` is a document with a schema,
`github` annotates a pull request, and `sarif` is for code scanners. All formats show the findings
in the same order (`sorting.sorted_findings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from planc.diagnostics.color import wants_color

if TYPE_CHECKING:
    from planc.diagnostics.diagnostic import Diagnostic

__all__ = ["FORMATS", "render", "wants_color"]

FORMATS = ("full", "concise", "json", "github", "sarif")


def render(
    diagnostics: Iterable[Diagnostic],
    format: str,
    *,
    color: bool = False,
    width: int = 100,
    also: Mapping[str, Any] | None = None,
) -> str:
    """The findings as text that ends with a newline, or is empty.

    Args:
        diagnostics: the findings, in any order.
        format: one of `FORMATS`.
        color: whether to use ANSI colors; for `full` and `concise`.
        width: the line width in terminal cells; for `full`.
        also: fields beside the findings, such as a verdict; for `json`.

    Raises:
        ValueError: there is no such format.
    """
    findings = tuple(diagnostics)
    match format:
        case "full":
            from planc.diagnostics import full

            return full.render(findings, color=color, width=width)
        case "concise":
            from planc.diagnostics import concise

            return concise.render(findings, color=color)
        case "json":
            from planc.diagnostics import json_document

            return json_document.render(findings, also)
        case "github":
            from planc.diagnostics import github

            return github.render(findings)
        case "sarif":
            from planc.diagnostics import sarif

            return sarif.render(findings)
    raise ValueError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
