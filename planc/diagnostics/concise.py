"""Findings on one line each, for editors and grep: `path:line:col: error[PL203]: message`."""

from collections.abc import Iterable

from planc.diagnostics.color import paint
from planc.diagnostics.diagnostic import Diagnostic
from planc.diagnostics.sorting import primary_span, sorted_findings
from planc.diagnostics.terminal_width import visible


def render(diagnostics: Iterable[Diagnostic], *, color: bool) -> str:
    """One line for each finding; empty if there are none."""
    return "".join(_line(diagnostic, color) + "\n" for diagnostic in sorted_findings(diagnostics))


def _line(diagnostic: Diagnostic, color: bool) -> str:
    span = primary_span(diagnostic)
    place = ""
    if span is not None:
        line, column = span.source.position(span.start)
        place = visible(span.source.name)
        place += ": " if span.source.argument else f":{line}:{column}: "
    message = visible(" ".join(diagnostic.message.split("\n")))
    kind = diagnostic.severity.value
    return paint([(place, ""), (f"{kind}[{diagnostic.code}]", kind), (f": {message}", "")], color)
