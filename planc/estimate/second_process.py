"""A forked process that does half of some jobs, where Linux has a second core."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

_LIMIT = 120.0
"""Seconds for one job, which takes about one; torch's threads do not survive a fork, and none
should be needed for tensors without data.
"""
_BUFFER = 2**20
"""Bytes of results that can wait while this process has a job of its own."""


def can_help() -> bool:
    """Whether there is a second core, and a process can be forked with what it has imported."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


class SecondProcess(Generic[Job, Result]):
    """
    Args:
        run: does a job, in either process.
        jobs: in order.

    Attributes:
        waiting: jobs whose result has not come yet.
    """

    def __init__(self, run: Callable[[Job], Result], jobs: Sequence[Job]) -> None:
        self.waiting, self._run, self._jobs = [*jobs], run, [*jobs]
        import fcntl  # Windows has none

        context = multiprocessing.get_context("fork")
        self._next = context.Value("i", 0)
        self._reader, writer = context.Pipe(duplex=False)
        with suppress(OSError):
            fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, _BUFFER)
        args = run, self._jobs, self._next, writer
        self._process = context.Process(target=_send, args=args, daemon=True)
        self._process.start()
        writer.close()

    def next(self) -> tuple[Job, Result | None]:
        """A job and its result: one that has come; else this process does one; else it waits. The
        result is None where the other process has ended.
        """
        if not self._reader.poll(0) and (at := _taken(self._next, len(self._jobs))) is not None:
            self.waiting.remove(self._jobs[at])
            return self._jobs[at], self._run(self._jobs[at])
        try:
            if self._reader.poll(_LIMIT):
                at, result = self._reader.recv()
                self.waiting.remove(self._jobs[at])
                return self._jobs[at], result
        except EOFError:
            pass
        job = self.waiting[0]
        self.end()
        return job, None

    def end(self) -> None:
        """Ends the process; what has not come yet does not come."""
        self.waiting.clear()
        self._process.kill()
        self._process.join()


def both(
    run: Callable[[Job], Result], jobs: Sequence[Job], *, alone: bool = False
) -> dict[Job, Result]:
    """The results of all jobs, by two processes if that is possible and not to be done `alone`;
    this one repeats what the other could not do.
    """
    found: dict[Job, Result] = {}
    if len(jobs) > 1 and can_help() and not alone:
        process = SecondProcess(run, jobs)
        try:
            while process.waiting:
                job, result = process.next()
                if result is not None:
                    found[job] = result
        finally:
            process.end()
    return {job: found[job] if job in found else run(job) for job in jobs}


def _taken(following: Any, count: int) -> int | None:
    """The place of the next job, which nobody else does then; None where all are taken."""
    with following.get_lock():
        at: int = following.value
        following.value += at < count
    return at if at < count else None


def _send(
    run: Callable[[Job], Result], jobs: Sequence[Job], following: Any, writer: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends both
    with suppress(BrokenPipeError):
        while (at := _taken(following, len(jobs))) is not None:
            writer.send((at, run(jobs[at])))
