"""Renders findings in one order: `full` and `concise` for people, `json` for programs, `github` for
pull requests, `sarif` for code scanners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from planc.report.color import wants_color

if TYPE_CHECKING:
    from planc.diagnostic import Diagnostic

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
        format: one of `FORMATS`.
        color, width: ANSI colors (`full`, `concise`), and terminal cells of a line (`full`).
        also: fields beside the findings, such as a verdict; for `json`.
    """
    found = tuple(diagnostics)
    match format:
        case "full":
            from planc.report import full

            return full.render(found, color=color, width=width)
        case "concise":
            from planc.report import concise

            return concise.render(found, color=color)
        case "json":
            from planc.report import json_document

            return json_document.render(found, also)
        case "github":
            from planc.report import github

            return github.render(found)
        case "sarif":
            from planc.report import sarif

            return sarif.render(found)
    raise ValueError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
