"""A process ends with its script's own exit status, though gloo's threads are slower than it."""

import subprocess
import sys
import threading
from itertools import repeat

import pytest
import torch

from planc.runtime import end_of_process

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, torch
from torch import distributed
if "waits" in sys.argv:
    from planc.runtime.end_of_process import wait_for_threads_at_exit
    wait_for_threads_at_exit()
before = set(os.listdir("/proc/self/task"))
distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
kept = distributed.group.WORLD  # as a mesh does: its threads are not joined before Python ends
core = {min(os.sched_getaffinity(0))}
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), core)
    if thread not in before:  # gloo's run where nothing else wants the core
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
for _ in range(100):
    distributed.all_reduce(torch.ones(1000))
distributed.destroy_process_group()
print("done")
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads do")


def ends(*words):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr
    return done.returncode


@linux
def test_slow_threads_of_gloo_do_not_abort_a_process_that_ends():
    assert any(map(ends, repeat("ends", 16))), "torch ends its threads by now: delete the module"
    assert not any(map(ends, repeat("waits", 8)))


@linux
def test_a_thread_that_runs_is_seen_and_is_waited_for_within_the_limit(monkeypatch):
    monkeypatch.setattr(end_of_process, "_LIMIT", 0.2)
    stop = threading.Event()
    one = torch.ones(400, 400)

    def work():
        while not stop.is_set():
            one @ one

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert any(end_of_process._another_runs() for _ in range(50))
        end_of_process._until_threads_rest()  # ends, although the thread does not
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join()
