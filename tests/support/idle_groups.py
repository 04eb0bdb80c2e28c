"""What idle process groups of gloo cost, and that destroying them ends it. Needs torch alone.

    python tests/support/idle_groups.py [COUNT]

Two processes make COUNT process groups (340 by default), use none of them, and measure their own
CPU time over three seconds; then they destroy the groups and measure again. With torch 2.13 each
group has three threads, and each thread wakes up about a hundred times a second.
"""

import datetime
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed, multiprocessing

SECONDS = 3


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def idle(rank, label):
    """Prints how many threads this process has, and how much of a core they take doing nothing."""
    distributed.barrier()
    before = time.process_time()
    time.sleep(SECONDS)
    share = (time.process_time() - before) / SECONDS
    if rank == 0:
        print(f"{label}: {threads()} threads, {share:.1%} of a core", flush=True)
    return threads()


def worker(rank, store, count, results):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        rank=rank,
        world_size=2,
        store=distributed.FileStore(store, 2),
        timeout=datetime.timedelta(seconds=60),
    )
    seen = [idle(rank, "the default group")]
    groups = [distributed.new_group([0, 1]) for _ in range(count)]
    seen.append(idle(rank, f"{count} groups more"))
    while groups:
        distributed.destroy_process_group(groups.pop())
    seen.append(idle(rank, "destroyed"))
    results.put(seen)
    distributed.destroy_process_group()


def measured(count):
    """How many threads a process has with the default group, with `count` more, and without."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=worker, args=(r, str(Path(folder) / "store"), count, results))
            for r in range(2)
        ]
        for process in processes:
            process.start()
        seen = [results.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
    return seen


if __name__ == "__main__":
    measured(int(sys.argv[1]) if len(sys.argv) > 1 else 340)
