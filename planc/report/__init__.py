"""Floor 5: diagnostics for people, editors, programs and GitHub."""

from __future__ import annotations

from collections.abc import Iterable

from planc.diagnostic import Diagnostic, Severity
from planc.report import full, lines, machine
from planc.report.colour import wants_colour

__all__ = ["FORMATS", "render", "summary", "wants_colour"]

FORMATS = ("full", "concise", "json", "github")


def render(
    diagnostics: Iterable[Diagnostic], format: str, *, colour: bool = False, width: int = 100
) -> str:
    """The diagnostics of a run, in the order of their places, those without a place first.

    Args:
        diagnostics: any number.
        format: one of FORMATS.
        colour: whether `full` uses the colours of a terminal.
        width: columns that `full` wraps facts and help to.
    """
    ordered = sorted(diagnostics, key=_place)
    match format:
        case "concise":
            return lines.concise(ordered)
        case "github":
            return lines.github(ordered)
        case "json":
            return machine.render(ordered)
        case _:
            return full.render(ordered, colour=colour, width=width) + summary(ordered) + "\n"


def _place(diagnostic: Diagnostic) -> tuple[bool, str, int]:
    if not diagnostic.labels:
        return (False, "", 0)
    span = diagnostic.labels[0].span
    return (True, "" if span.source.argument else span.source.name, span.start)


def summary(diagnostics: Iterable[Diagnostic]) -> str:
    """`2 errors, 1 warning`, or `no findings`."""
    found = list(diagnostics)
    words = []
    for severity, name in (
        (Severity.ERROR, "error"),
        (Severity.WARNING, "warning"),
        (Severity.INFO, "note"),
    ):
        count = sum(d.severity is severity for d in found)
        if count:
            words.append(f"{count} {name}{'s' if count > 1 else ''}")
    return ", ".join(words) or "no findings"
