"""Four real gloo processes that stay for the whole session, and run functions by name.

Importing torch and transformers takes seconds, so the processes start once. A job names a function
of a module that they can import; every rank calls it with the same arguments, and the results come
back by rank. A rank that dies or hangs ends the pool, and with it the job: the error then has the
stack of every rank that did not answer, so that a hang names the collective that it waits in.
"""

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import os
import queue
import signal
import tempfile
import time
import traceback
from pathlib import Path

WORLD = 4
MOST_THREADS = 100  # of a process of the pool; a job on four ranks has about 20
START = 600  # seconds that the processes get to import torch and transformers
COLLECTIVE = 60  # seconds that a collective may take
GRACE = 15  # seconds that ranks get to follow one that raised


def worker(rank, store, parent, jobs, results):
    """Runs jobs until the session ends.

    Args:
        store: the path of the file of the process group's store, and the world size.
        parent: the process id of the session.
        results: gets (rank, None, None) once the process is ready, then what each job gives.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    stacks = Path(store[0]).with_name(f"{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    import numerics  # noqa: F401 (with it all that most jobs need: DTensor, transformers, planc)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=COLLECTIVE)
    # A mesh makes its groups without a timeout, and they would wait for half an hour by default.
    distributed.distributed_c10d.default_pg_timeout = timeout
    distributed.init_process_group(
        "gloo",
        rank=rank,
        world_size=store[1],
        store=distributed.FileStore(*store),
        timeout=timeout,
    )
    results.put((rank, None, None))
    for module, name, arguments in until_stopped(jobs, parent):
        destroy_groups()
        try:
            result = getattr(importlib.import_module(module), name)(**arguments)
            results.put((rank, True, result))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


def destroy_groups():
    """Destroys the process groups of the job before, whose ranks have all answered by now.

    Each group of gloo has three threads that wake up a hundred times a second each, idle or not
    (`idle_groups.py` measures it). The groups of 340 jobs took a whole core and starved the ranks
    until collectives ran into their time limit.
    """
    from torch import distributed
    from torch.distributed.tensor import _redistribute, debug

    from planc.runtime import meshes

    # torch's caches hold meshes, and would give them to later jobs whose meshes are equal
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    # `isinstance` asks a dead weak proxy for its class, which raises
    for cached in [o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper]:
        if str(cached.__module__).startswith("torch.distributed"):
            cached.cache_clear()
    gc.collect()  # handles and FSDP's states hold meshes in cycles
    meshes._MADE.clear()
    for group in list(distributed.distributed_c10d._world.pg_map):
        if group is not distributed.group.WORLD:
            distributed.destroy_process_group(group)


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
        self._started = False

    @property
    def alive(self):
        return all(p.is_alive() for p in self._processes)

    @property
    def threads(self):
        """How many threads a process has: those of groups that a library keeps never end."""
        try:
            return len([*Path(f"/proc/{self._processes[0].pid}/task").iterdir()])
        except OSError:  # not on Linux, or gone
            return 0

    def run(self, function, timeout=120, **arguments):
        """The results of `module.function(**arguments)` on every rank, by rank.

        Args:
            function: `module.function`, of a module of the tests or one that is installed.
            timeout: seconds. The processes' start is not counted: importing torch and transformers
                takes minutes where other work shares the cores.

        Raises:
            RankError: a rank raised, died, or did not answer in time.
        """
        if not self._started:
            self._answers("the start", START)
            self._started = True
        module, _, name = function.rpartition(".")
        for jobs in self._jobs:
            jobs.put((module, name, arguments))
        return self._answers(function, timeout)

    def _answers(self, what, timeout):
        """What every rank answers, by rank."""
        answers, failed = {}, {}
        deadline = time.monotonic() + timeout
        while len(answers) + len(failed) < len(self._processes):
            try:
                rank, good, value = self._results.get(timeout=0.5)
            except queue.Empty:
                lost = self._lost(answers | failed)
                if lost or time.monotonic() > deadline:
                    stacks = {} if failed or lost else self._stacks(answers)
                    self.close()  # the others may wait for it in a collective
                    late = f"{what} did not end on every rank in {timeout} s\n{told(stacks)}"
                    raise RankError(told(failed | lost) or late) from None
                continue
            (failed if good is False else answers)[rank] = value
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

    def _stacks(self, heard):
        """The Python stacks of the ranks that have not answered."""
        silent = [rank for rank in range(len(self._processes)) if rank not in heard]
        files = {rank: Path(self._folder.name) / f"{rank}.stacks" for rank in silent}
        for rank in silent:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        end = time.monotonic() + 10  # a handler of the signal writes the stack
        while time.monotonic() < end and not all(
            "<module>" in f.read_text() for f in files.values()
        ):
            time.sleep(0.1)
        return {rank: file.read_text() for rank, file in files.items()}

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


class HealthyPool:
    """A pool for a session, replaced after a job has ended it or has left many threads.

    35 tests of Megatron-FSDP left 500 threads, which made each test after them four times as slow.
    """

    def __init__(self):
        self._pool = None

    def run(self, function, **arguments):
        """Calls a function on every rank, as `Pool.run` does."""
        if self._pool is not None and self._pool.threads > MOST_THREADS:
            self._pool.close()
        if self._pool is None or not self._pool.alive:
            self._pool = Pool()
        return self._pool.run(function, **arguments)

    def close(self):
        if self._pool is not None:
            self._pool.close()


def told(texts):
    return "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(texts.items()))
