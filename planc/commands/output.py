"""What commands share: the plan that they name, how findings are shown, and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

# Each command imports what it needs, so that `planc fmt` starts quickly.
if TYPE_CHECKING:
    from planc.compiler import Compiled
    from planc.diagnostic import Diagnostic, Sink

CLEAN, FINDINGS, FAILED = 0, 1, 2


def compiled(options: argparse.Namespace, sink: Sink) -> Compiled:
    from planc.compiler import compile_plan

    return compile_plan(
        options.model,
        options.plan,
        sink,
        world_size=options.world_size,
        settings=options.set,
        allow_code=options.allow_code,
    )


def show(
    sink: Iterable[Diagnostic],
    format: str,
    stream: object,
    *,
    quiet: bool = False,
    also: Mapping[str, Any] | None = None,
) -> None:
    """Prints the findings; `quiet` leaves out infos and an empty summary.

    `also` has further fields of a JSON document.
    """
    found = [d for d in sink if not (quiet and d.severity == "info")]
    if quiet and not found:
        return
    from planc.report import render, wants_color

    color = wants_color(stream, os.environ)
    text = render(found, format, color=color, width=_width(), also=also)
    print(text, end="" if text.endswith("\n") or not text else "\n", file=stream)  # type: ignore[call-overload]


def _width() -> int:
    import shutil

    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))


def exit_code(sink: Sink, *, strict: bool = False) -> int:
    """The exit code for the findings.

    Args:
        sink: the findings.
        strict: whether warnings without errors give 1.
    """
    from planc.codes import exit_code

    warned = strict and any(d.severity == "warning" for d in sink)
    found = exit_code(d.code for d in sink if d.severity == "error")
    return FINDINGS if warned and found == CLEAN else found


def write(text: str, output: str | None) -> int:
    """Writes to standard output, or atomically to a file."""
    if output is None or output == "-":
        sys.stdout.write(text)
        return CLEAN
    from pathlib import Path

    from planc import atomic_write
    from planc.diagnostic import Sink

    try:
        atomic_write.write(Path(output), text)
    except OSError as error:
        sink = Sink()
        sink.error("PL020", f"cannot write {output}: {(error.strerror or str(error)).lower()}")
        show(sink, "full", sys.stderr)
        return FAILED
    return CLEAN
