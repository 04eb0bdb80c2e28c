"""Counts in a second process, while a search goes on in this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from planc.estimate.counted import Counted

Job = tuple[int, int, str, tuple[str, int]]
"""Rows, tokens, the dtype, and what attention exchanges with how many parts."""

_LIMIT = 120.0
"""Seconds for one count, which takes less than one; torch's threads do not survive a fork, and none
should be needed for tensors without data.
"""


def can_help() -> bool:
    """Whether there is a second core, and a process can be forked with what it has imported."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


class CountingProcess:
    """
    Args:
        run: counts a job.
        jobs: in order.

    Attributes:
        waiting: jobs whose count has not come yet.
    """

    def __init__(self, run: Callable[[Job], Counted | None], jobs: Sequence[Job]) -> None:
        self.waiting = [*jobs]
        context = multiprocessing.get_context("fork")
        self._reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_send, args=(run, jobs, writer), daemon=True)
        self._process.start()
        writer.close()

    def next(self) -> tuple[Job, Counted | None]:
        """Waits for the next job, and its count; None where there is none."""
        job = self.waiting.pop(0)
        try:
            if self._reader.poll(_LIMIT):
                one: Counted | None = self._reader.recv()
                return job, one
        except EOFError:
            pass
        self.end()
        return job, None

    def end(self) -> None:
        """Ends the process; what has not come yet does not come."""
        self.waiting.clear()
        self._process.kill()
        self._process.join()


def _send(run: Callable[[Job], Counted | None], jobs: Sequence[Job], writer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the search ends both
    with suppress(BrokenPipeError):
        for job in jobs:
            writer.send(run(job))
