"""The end of a process whose threads of gloo may still hold what they sent."""

import atexit
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_LIMIT, _BETWEEN = 2.0, 0.01
"""Seconds: of waiting at most (another library's thread may never rest), and between two looks."""


@cache  # once a process
def wait_for_threads_at_exit() -> None:
    """Lets the interpreter end after gloo's threads have let go of the tensors that they sent.

    A thread that does so while the interpreter ends aborts the process, though its script has done
    all its work (pytorch#190489; seen on busy machines, mostly in rank 0). To destroy the process
    groups joins their threads only if nothing else holds the groups, as a script's model does.
    """
    atexit.register(_until_threads_rest)


def _until_threads_rest() -> None:
    deadline, quiet = time.monotonic() + _LIMIT, 0
    while quiet < 2 and time.monotonic() < deadline:
        # A thread that waits for the interpreter's lock seems to rest: it gets the lock meanwhile,
        # and is seen to run at the second look.
        time.sleep(_BETWEEN)
        quiet = 0 if _another_runs() else quiet + 1


def _another_runs() -> bool:
    """Whether another thread of this process runs, or waits for a core. Only Linux tells."""
    this_thread = str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            if thread.name != this_thread and _state(thread) == "R":
                return True
    return False


def _state(thread: Path) -> str:
    """The letter of a thread's state: behind its name, which is in parentheses (proc_pid_stat)."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
