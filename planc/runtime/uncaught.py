"""The errors of a plan that a script does not catch: printed once for all ranks of a run."""

import os
import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from planc.diagnostics import render
from planc.diagnostics.diagnostic import PlanError, Severity
from planc.runtime.script_line import of_the_user

_SECONDS = 1
"""The time that a rank leaves the one that reports: a launcher ends all ranks with the first."""


@contextmanager
def print_errors_once() -> Iterator[None]:
    """Replaces the traceback of an error that ends all ranks which a launcher started: the rank
    `PlanError.rank` prints its findings and the line of the script, each other rank the name of
    that rank. Leaves an error that the script catches, or raises another one from, as it is.
    """
    try:
        yield
    except PlanError as error:
        _replace_traceback(error)
        raise


def _replace_traceback(error: PlanError) -> None:
    rank = os.environ.get("RANK", "")
    if not rank.isdecimal() or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    reference, before = weakref.ref(error), sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not reference() or not isinstance(value, PlanError):
            before(kind, value, trace)
        elif value.rank in (None, int(rank)):
            print(_report(value, trace), end="", file=sys.stderr, flush=True)
        else:
            text = f"planc: rank {rank} ends with the error that rank {value.rank} reports"
            print(text, file=sys.stderr, flush=True)
            time.sleep(_SECONDS)

    sys.excepthook = hook


def _report(error: PlanError, trace: TracebackType | None) -> str:
    """The errors, behind the innermost line of the script."""
    own = [frame for frame, _ in traceback.walk_tb(trace) if of_the_user(frame)]
    lines = {id(frame): number for frame, number in traceback.walk_tb(trace)}
    at = f"{own[-1].f_code.co_filename}:{lines[id(own[-1])]}: " if own else ""
    errors = [d for d in error.diagnostics if d.severity is Severity.ERROR]
    return f"{at}planc cannot apply the plan\n{render(errors, 'full')}"
