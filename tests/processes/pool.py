"""Four real gloo processes that stay for the whole session, and run functions by name.

Importing torch and transformers takes seconds, so the processes start once. A job names a function
of a module that they can import; every rank calls it with the same arguments, and the results come
back by rank. A rank that dies or hangs ends the pool, and with it the job, with its own error.
"""

import contextlib
import datetime
import importlib
import os
import queue
import sys
import tempfile
import time
import traceback
from pathlib import Path

WORLD = 4
TESTS = Path(__file__).parent
GRACE = 15  # seconds that ranks get to follow one that raised


def worker(rank, store, parent, jobs, results):
    """The life of one process; `store` is the path of a file to meet at, and how many meet."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(TESTS))
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        rank=rank,
        world_size=store[1],
        store=distributed.FileStore(*store),
        timeout=datetime.timedelta(seconds=60),
    )
    from planc.runtime import meshes

    meshes._MADE = {}  # torch frees no process group, so the next job of a mesh shares them
    for module, name, arguments in until_stopped(jobs, parent):
        try:
            result = getattr(importlib.import_module(module), name)(**arguments)
            results.put((rank, True, result))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


def until_stopped(jobs, parent):
    """Jobs, until there is a None, or until the session that sends them is gone."""
    while os.getppid() == parent:
        with contextlib.suppress(queue.Empty):
            job = jobs.get(timeout=2)
            if job is None:
                return
            yield job


class RankError(AssertionError):
    """What a rank raised, with its traceback."""


class Pool:
    """Processes that hold a gloo process group.

    Args:
        world: how many.
    """

    def __init__(self, world=WORLD):
        from torch import multiprocessing

        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self._folder = tempfile.TemporaryDirectory()
        self._results = context.Queue()
        self._jobs = [context.Queue() for _ in range(world)]
        store = (str(Path(self._folder.name) / "store"), world)
        self._processes = [
            context.Process(
                target=worker,
                args=(rank, store, os.getpid(), jobs, self._results),
                daemon=True,
            )
            for rank, jobs in enumerate(self._jobs)
        ]
        for process in self._processes:
            process.start()

    @property
    def alive(self):
        return all(p.is_alive() for p in self._processes)

    def run(self, function, timeout=120, **arguments):
        """The results of `module.function(**arguments)` on every rank, by rank.

        Args:
            function: `module.function`, of a module in this folder or one that is installed.
            timeout: seconds; the first job of a pool waits for its processes too.

        Raises:
            RankError: a rank raised, died, or did not answer in time.
        """
        module, _, name = function.rpartition(".")
        for jobs in self._jobs:
            jobs.put((module, name, arguments))
        answers, failed = {}, {}
        deadline = time.monotonic() + timeout
        while len(answers) + len(failed) < len(self._processes):
            try:
                rank, good, value = self._results.get(timeout=0.5)
            except queue.Empty:
                lost = self._lost(answers | failed)
                if lost or time.monotonic() > deadline:
                    self.close()  # the others may wait for it in a collective
                    late = f"{function} did not end on every rank in time"
                    raise RankError(told(failed | lost) or late) from None
                continue
            (answers if good else failed)[rank] = value
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failed:
            raise RankError(told(failed))
        return [answers[rank] for rank in sorted(answers)]

    def _lost(self, heard):
        """The ranks that died before they answered."""
        return {
            rank: f"the process ended with exit code {process.exitcode}"
            for rank, process in enumerate(self._processes)
            if rank not in heard and not process.is_alive()
        }

    def close(self):
        for jobs in self._jobs:
            jobs.put(None)
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(timeout=max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def told(texts):
    return "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(texts.items()))
