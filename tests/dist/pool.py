"""Four real gloo processes that stay for the whole session, and run functions by name.

Importing torch and transformers takes seconds, so the processes start once. A job names a function
of a module that they can import; every rank calls it with the same arguments, and the results come
back by rank. A rank that dies or hangs ends the pool, and with it the job, with its own error.
"""

import contextlib
import datetime
import importlib
import os
import sys
import tempfile
import traceback
from pathlib import Path

WORLD = 4
TESTS = Path(__file__).parent


def worker(rank, world, store, jobs, results):
    """The life of one process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(TESTS))
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        rank=rank,
        world_size=world,
        store=distributed.FileStore(store, world),
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        job = jobs.get()
        if job is None:
            break
        module, name, arguments = job
        try:
            result = getattr(importlib.import_module(module), name)(**arguments)
            results.put((rank, True, result))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


class RankError(AssertionError):
    """What a rank raised, with its traceback."""


class Pool:
    def __init__(self, world=WORLD):
        from torch import multiprocessing

        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._results = context.Queue()
        self._jobs = [context.Queue() for _ in range(world)]
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            context.Process(
                target=worker, args=(rank, world, store, jobs, self._results), daemon=True
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

        Raises:
            RankError: a rank raised, died, or did not answer in time.
        """
        module, _, name = function.rpartition(".")
        for jobs in self._jobs:
            jobs.put((module, name, arguments))
        answers = {}
        failed = {}
        while len(answers) + len(failed) < len(self._processes):
            try:
                rank, good, value = self._results.get(timeout=15 if failed else timeout)
            except Exception:  # queue.Empty: a rank died, hangs, or waits for one that raised
                self.close()
                told = "\n".join(f"rank {r}:\n{t}" for r, t in failed.items())
                raise RankError(told or f"{function} did not end in {timeout} s") from None
            (answers if good else failed)[rank] = value
        if failed:
            raise RankError("\n".join(f"rank {r}:\n{t}" for r, t in sorted(failed.items())))
        return [answers[rank] for rank in sorted(answers)]

    def close(self):
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        with contextlib.suppress(OSError):
            self._folder.cleanup()
