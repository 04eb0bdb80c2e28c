"""Lends the processes of `planc.simulate.rank_job.RankRunner` from test to test.

A process imports torch and transformers for five seconds, and forks for each job. So a process that
a test has finished with serves the next test that would start the same one.
"""

import os
import sys
from collections import OrderedDict

from planc.simulate.rank_job import RankRunner

MOST = 2
"""The number of idle processes of a test worker."""


class IdleProcesses:
    """The processes that no test uses, by everything that they were started with."""

    def __init__(self):
        self.idle = OrderedDict()
        self.keys = {}
        self.start_process, self.stop_process = RankRunner.start, RankRunner.stop

    def install(self, patch):
        """Replaces the two methods of `RankRunner` that start and stop a process."""

        def start(runner):
            return self.start(runner)

        def stop(runner, process):
            self.stop(runner, process)

        patch.setattr(RankRunner, "start", start)
        patch.setattr(RankRunner, "stop", stop)

    def start(self, runner):
        """An idle process that was started with the same, or a new one."""
        key = self._key(runner)
        process = self.idle.pop(key, None)
        if process is None or process.poll() is not None:
            process = self.start_process(runner)
        self.keys[process.pid] = key
        return process

    def stop(self, runner, process):
        """Keeps a process for the next test, and ends the one idle longest."""
        key = self.keys.pop(process.pid)
        if process.poll() is not None or key in self.idle:
            self.stop_process(runner, process)
            return
        self.idle[key] = process
        while len(self.idle) > MOST:
            self._end()

    def end_all(self):
        while self.idle:
            self._end()

    def _end(self):
        _, process = self.idle.popitem(last=False)
        self.stop_process(RankRunner(), process)

    def _key(self, runner):
        variables = {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}
        relative = any(not os.path.isabs(path) for path in sys.path)  # noqa: PTH117
        folder = os.getcwd() if relative else ""  # noqa: PTH109
        return runner.MODULE, tuple(sys.path), frozenset(variables.items()), folder
