"""The errors of a plan that a script does not catch: printed once for all ranks of a run."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType

from torch.distributed import distributed_c10d

from planc.diagnostics import render
from planc.diagnostics.diagnostic import PlanError, Severity, first_line
from planc.runtime.script_line import of_the_user

ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_SECONDS = 1
"""The time that a rank leaves the one that reports: a launcher ends all ranks with the first."""
_REPORTED = "planc/reported_error"
"""The key in the store of the process group under which the first rank with an error is written."""


@contextmanager
def print_errors_once() -> Iterator[None]:
    """Replaces the traceback of errors that end the ranks which a launcher started, those raised
    inside and those of later training steps.

    The rank that reports an error prints its findings and the line of the script; each other rank
    prints one line. An error that the script catches, or raises another one from, is not affected.
    """
    try:
        yield
    finally:  # once the process group is started, whose own hook would add a prefix to each line
        _replace_hook()


def _replace_hook() -> None:
    rank = os.environ.get("RANK", "")
    if not rank.isdecimal() or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    if getattr(sys.excepthook, "func", None) is not _print_error:
        sys.excepthook = partial(_print_error, sys.excepthook, int(rank))


def _print_error(
    before: ExceptionHook,
    rank: int,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Prints an error that ends this rank: one of planc briefly, others as the hook `before`."""
    if not isinstance(error, PlanError):
        before(kind, error, trace)
        return
    reporting, message = error.rank, first_line(error)
    if reporting is None:
        reporting, message = _first_report(rank, message)
    if reporting == rank:
        print(_report(error, trace), end="", file=sys.stderr, flush=True)
        return
    text = f"planc: rank {rank} ends with the error that rank {reporting} reports"
    if message != first_line(error):
        text = f"planc: rank {rank} ends after rank {reporting}, with {first_line(error)}"
    print(text, file=sys.stderr, flush=True)
    time.sleep(_SECONDS)


def _first_report(rank: int, message: str) -> tuple[int, str]:
    """The first rank of the run with an error, and its message: this rank if it is the first, or if
    the ranks have no store to compare in.
    """
    try:
        store = distributed_c10d._get_default_store()
        known = store.compare_set(_REPORTED, "", f"{rank} {message}").decode()
    except (RuntimeError, ValueError):  # no process group, or its store ended with another rank
        return rank, message
    first, _, told = known.partition(" ")
    return int(first), told


def _report(error: PlanError, trace: TracebackType | None) -> str:
    """The errors, after the innermost line of the script."""
    user_frames = [frame for frame, _ in traceback.walk_tb(trace) if of_the_user(frame)]
    lines = {id(frame): number for frame, number in traceback.walk_tb(trace)}
    at = (
        f"{user_frames[-1].f_code.co_filename}:{lines[id(user_frames[-1])]}: "
        if user_frames
        else ""
    )
    errors = [d for d in error.diagnostics if d.severity is Severity.ERROR]
    return f"{at}planc stopped the run\n{render(errors, 'full')}"
