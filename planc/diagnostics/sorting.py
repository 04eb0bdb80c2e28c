"""Selects, sorts and counts the findings of a report."""

from collections.abc import Iterable
from dataclasses import replace

from planc.diagnostics.diagnostic import Diagnostic, Label, Severity
from planc.diagnostics.source import Span


def sorted_findings(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The findings in the order in which a report shows them, without duplicates.

    Errors without a location come first: they concern the invocation or the model, and often
    cause the rest. Then come findings with a location, by source in the order of first mention,
    then by offset. Warnings and infos about the plan as a whole come last. The two plans of a
    diff may share files, so equal findings are shown once.
    """
    seen: dict[object, Diagnostic] = {}
    for diagnostic in diagnostics:
        seen.setdefault(_identity(diagnostic), diagnostic)
    unique = tuple(seen.values())
    sources: dict[str, int] = {}
    for diagnostic in unique:
        for label in labels_with_source(diagnostic):
            sources.setdefault(label.span.source.name, len(sources))
    return tuple(sorted(unique, key=lambda d: _rank(d, sources)))


def labels_with_source(diagnostic: Diagnostic) -> tuple[Label, ...]:
    """The labels that point into a source text, the primary one first."""
    return tuple(label for label in diagnostic.labels if label.span.source.name)


def primary_span(diagnostic: Diagnostic) -> Span | None:
    """The span of the first label that points into a source text."""
    return next((label.span for label in labels_with_source(diagnostic)), None)


def is_file(span: Span) -> bool:
    """Whether a source is a file: an argument and standard input are not."""
    return not span.source.argument and not span.source.name.startswith("<")


def describe_label(label: Label) -> str:
    """A label in words, with its place."""
    place = label.span.place
    return f"{place}: {label.text}" if label.text else place


def notes(diagnostic: Diagnostic) -> list[str]:
    """The facts and the help of a finding, as lines of text."""
    help = [f"help: {diagnostic.help}"] if diagnostic.help else []
    return [*(f"fact: {fact}" for fact in diagnostic.facts), *help]


def counts(diagnostics: Iterable[Diagnostic]) -> dict[str, int]:
    """The number of findings of each severity, by its name."""
    severities = [d.severity for d in diagnostics]
    return {severity.value: severities.count(severity) for severity in Severity}


def summary(diagnostics: Iterable[Diagnostic]) -> str:
    """`2 errors, 1 warning`, or `no findings`."""
    parts = []
    for name, number in counts(sorted_findings(diagnostics)).items():
        if number:
            parts.append(f"{number} {name}{'s' if number > 1 else ''}")
    return ", ".join(parts) or "no findings"


def _rank(diagnostic: Diagnostic, sources: dict[str, int]) -> tuple[int, int, int]:
    span = primary_span(diagnostic)
    if span is not None:
        return 1, sources[span.source.name], span.start
    return (0 if diagnostic.severity is Severity.ERROR else 2), 0, 0


def _identity(diagnostic: Diagnostic) -> object:
    """The key for equality of findings: sources compare by content, not by identity."""
    spans = ((label.span, label.text) for label in diagnostic.labels)
    labels = tuple((s.source.name, s.source.text, s.start, s.end, text) for s, text in spans)
    return replace(diagnostic, labels=()), labels
