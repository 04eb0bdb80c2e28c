"""The common parts of commands: the plan that they name, how findings are shown, and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from planc.diagnostics.diagnostic import Sink, io_reason

# Each command imports what it needs, so that `planc fmt` starts quickly.
if TYPE_CHECKING:
    from planc.compiler import Compiled
    from planc.diagnostics.diagnostic import Diagnostic
    from planc.files.project import Target

CLEAN, FINDINGS, FAILED = 0, 1, 2


def compiled(options: argparse.Namespace, sink: Sink) -> Compiled:
    """The plan that a command names, compiled for the model that it names."""
    from planc.files.project import Target

    target = Target(
        model=options.model,
        plan=options.plan,
        world_size=options.world_size,
        set=tuple(options.set),
    )
    with waiting(f"reading {options.model}"):
        return compiled_target(target, sink, allow_code=options.allow_code)


def compiled_target(
    target: Target, sink: Sink, *, allow_code: bool, drafts: bool = False
) -> Compiled:
    """A plan compiled for a model; says on standard error which one was taken, if none is named.

    Args:
        target: the model, and perhaps the plan.
        allow_code: whether Python code that they name may be run.
        drafts: whether a family without a plan gets a draft; PL022 otherwise.
    """
    from planc.compiler import Compiled, compile_plan
    from planc.syntax import plan_files
    from planc.tools.init.parsed import parsed

    if out_of_place(target.model, target.plan, sink):
        return Compiled()
    result = compile_plan(
        target.model,
        target.plan,
        sink,
        world_size=target.world_size,
        settings=target.set,
        allow_code=allow_code,
        draft=parsed if drafts else None,
    )
    if target.plan is None and isinstance(result.files, tuple) and result.facts:
        chosen = result.files[-1].origin.source.name
        draft = plan_files.drafted(result.files)
        wrote = f", as `planc init {target.model} -o my.plan` writes it" if draft else ""
        print(f"the plan is {chosen}, for {result.facts.family}{wrote}", file=sys.stderr)
    return result


def out_of_place(model: str, plan: str | None, sink: Sink) -> bool:
    """Reports a model in the place of a plan, and perhaps a plan in that of the model."""
    from planc.files.project import ProjectError
    from planc.model.config import locate_config

    if plan is None or ":" in model or plan.endswith(".plan"):
        return False
    try:
        if _is_plan(model) and locate_config(plan):  # in this order: a hub name is slow
            message = f"{model} is a plan, and {plan} is a model: MODEL comes before PLAN"
            sink.error("PL600", message, help=f"write {plan} {model}")
            return True
        if _names_model(plan):
            message = f"{plan} is a model, in the place of a plan"
            sink.error("PL006", message, help="models come first, and then plans")
            return True
    except ProjectError:  # reported where the plan is read
        pass
    return False


def _is_plan(model: str) -> bool:
    """Whether what stands in the place of the model is a plan."""
    from planc.model.config import locate_config
    from planc.syntax.plan_files import locate

    return (model.endswith(".plan") or not locate_config(model)) and locate(model) is not None


def models_and_plans(model: str, others: Sequence[str]) -> tuple[list[str], list[str]]:
    """The models and the plans of a command line: further models come before the plans, and what
    can be read as a plan is one.
    """
    from planc.files.project import ProjectError

    models, plans = [model], [*others]
    try:
        reversed_ = plans and _is_plan(model)  # `out_of_place` says so
        while plans and not reversed_ and _names_model(plans[0]):
            models.append(plans.pop(0))
    except ProjectError:  # reported where the plan is read
        return [model], [*others]
    return models, plans


def _names_model(word: str) -> bool:
    """Whether a word names a configuration, and no plan."""
    from planc.model.config import locate_config
    from planc.syntax.plan_files import locate

    plan = locate(word)
    if plan is not None and not (plan.path and plan.path.is_dir()):
        return word.endswith("config.json")
    found = locate_config(word)
    return found is not None and found.path.is_file()


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
    found = [d for d in sink if not (quiet and d.severity == "info")]
    if quiet and not found:
        return
    from planc.diagnostics import render, wants_color

    color = wants_color(stream, os.environ)
    width = _width() if format == "full" else 0
    text = render(found, format, color=color, width=width, also=also)
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
    found = exit_code(d.code for d in sink if d.severity == "error")
    return FINDINGS if warned and found == CLEAN else found


def refused(code: str, message: str, help: str | None = None) -> int:
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
        return refused("PL020", f"cannot write {output}: {io_reason(error)}")
    return CLEAN
