"""The common parts of commands: the plan that they name, how findings are shown, and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from planc.diagnostics.diagnostic import Sink, io_reason

# Each command imports what it needs, so that `planc fmt` starts quickly.
if TYPE_CHECKING:
    from planc.compiler import Compiled, Draft
    from planc.diagnostics.diagnostic import Diagnostic
    from planc.files.project import Target

CLEAN, FINDINGS, FAILED = 0, 1, 2


def compile_options(options: argparse.Namespace, sink: Sink) -> Compiled:
    """The plan that a command names, compiled for the model that it names."""
    with waiting(f"reading {options.model}"):
        return compiled_target(options, sink, options.allow_code)


def compiled_target(
    target: Target | argparse.Namespace, sink: Sink, allow_code: bool, draft: Draft | None = None
) -> Compiled:
    """A plan compiled for a model; prints on standard error which one was chosen, if none is
    named. A family without a plan gets its `draft`, else PL022.
    """
    from planc.answers.target import chosen_plan, compile_named
    from planc.syntax.plan_files import is_draft

    options = {"world_size": target.world_size, "settings": target.set, "allow_code": allow_code}
    result = compile_named(target.model, target.plan, sink, draft=draft, **options)
    if target.plan is None and (chosen := chosen_plan(result)):
        wrote = f", as `planc init {target.model} -o my.plan` writes it" * is_draft(result.files)
        print(f"{chosen}{wrote}", file=sys.stderr)
    return result


@contextmanager
def waiting(text: str) -> Iterator[Callable[[int, int], None]]:
    """Shows on a terminal what takes more than a second; nothing where standard error is no
    terminal. What it yields takes how much is done, of how much.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from threading import Timer

    shown: list[Any] = []
    description = [text]  # kept for a bar that is shown later

    def show_status() -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        plain = TextColumn("{task.description}", markup=False)
        columns = SpinnerColumn(), plain, TimeElapsedColumn()
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = bar.add_task(text)
        shown.append(bar)
        bar.update(task, description=description[0])
        bar.start()

    def update(done: int, total: int) -> None:
        description[0] = f"{text}: {done} of {total}"
        for bar in shown:
            bar.update(bar.task_ids[0], description=description[0])

    timer = Timer(1.0, show_status)
    timer.start()
    try:
        yield update
    finally:
        timer.cancel()
        timer.join()
        for status in shown:
            status.stop()


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
    shown = [d for d in sink if not (quiet and d.severity == "info")]
    if quiet and not shown:
        return
    from planc.diagnostics import render, wants_color

    color = wants_color(stream, os.environ)
    width = _width() if format == "full" else 0
    text = render(shown, format, color=color, width=width, also=also)
    print(text, end="" if text.endswith("\n") or not text else "\n", file=stream)  # type: ignore[call-overload]


def _width() -> int:
    import shutil

    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def exit_code(sink: Sink, *, strict: bool = False) -> int:
    """The exit code for the findings.

    Args:
        strict: whether warnings without errors give 1.
    """
    from planc.diagnostics.codes import exit_code

    warned = strict and any(d.severity == "warning" for d in sink)
    code = exit_code(d.code for d in sink if d.severity == "error")
    return FINDINGS if warned and code == CLEAN else code


def show_error(code: str, message: str, help: str | None = None) -> int:
    """Shows one error, on standard error; returns its exit code."""
    sink = Sink()
    sink.error(code, message, help=help)
    show(sink, "full", sys.stderr)
    return exit_code(sink)


def write(text: str, output: str | None) -> int:
    """Writes to standard output, or atomically to a file."""
    if output is None or output == "-":
        sys.stdout.write(text)
        return CLEAN
    from pathlib import Path

    from planc.files import atomic_write

    try:
        atomic_write.write(Path(output), text)
    except OSError as error:
        return show_error("PL020", f"cannot write {output}: {io_reason(error)}")
    return CLEAN
