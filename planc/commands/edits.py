"""Corrections of misspelled names, written into plans (`--fix`)."""

import sys
from collections.abc import Iterable
from pathlib import Path

from planc.diagnostics.diagnostic import Diagnostic, io_reason
from planc.diagnostics.source import Source, Span
from planc.files import atomic_write


def correct(findings: Iterable[Diagnostic]) -> None:
    """Makes each edit of the findings in its file, and says so on standard error, because a report
    for programs is on standard output.

    Only a file that holds what was judged is changed: not standard input, a revision of git, or a
    plan that ships with planc.
    """
    by_file: dict[str, tuple[Source, dict[tuple[int, int], tuple[Span, str]]]] = {}
    for finding in findings:
        if finding.edit is not None:
            span, text = finding.edit
            source, edits = by_file.setdefault(span.source.name, (span.source, {}))
            edits[span.start, span.end] = span, text
    for source, edits in by_file.values():
        path = Path(source.name)
        if source.argument or not _holds(path, source.text):
            print(f"not corrected: {source.name} is not a file of yours", file=sys.stderr)
            continue
        text, last, done = source.text, len(source.text) + 1, list[str]()
        for span, meant in sorted(edits.values(), key=lambda e: -e[0].start):
            if span.end <= last:  # two findings may correct one place
                text, last = text[: span.start] + meant + text[span.end :], span.start
                done.append(f"corrected {span.place}: {span.text} -> {meant}")
        try:
            atomic_write.write(path, text)
        except OSError as error:
            done = [f"not corrected: cannot write {path}: {io_reason(error)}"]
        print("\n".join(done), file=sys.stderr)


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_bytes().decode("utf-8-sig") == text
    except (OSError, ValueError):
        return False
