"""Ranks that are threads run one at a time, and still end where one waits by its own means."""

import threading
import time
from contextlib import suppress

import torch
from torch import distributed

from planc.simulate import thread_ranks
from planc.simulate.turns import Turns


def test_one_rank_runs_at_a_time():
    running, most = set(), []

    def program(rank):
        for _ in range(5):
            running.add(rank)
            time.sleep(0.002)  # any other thread may run now
            most.append(len(running))
            running.discard(rank)
            distributed.all_reduce(torch.ones(1))

    assert thread_ranks.run_ranks(4, program, seconds=60) is None
    assert max(most) == 1 and len(most) == 20


def test_a_rank_that_waits_for_another_without_a_collective():
    """As for a key of a store: the other one runs beside it after a while."""
    event, waited = threading.Event(), []

    def program(rank):
        if rank:
            event.set()
        else:
            waited.append(event.wait(30))
        distributed.barrier()

    assert thread_ranks.run_ranks(2, program, seconds=60) is None
    assert waited == [True]


def test_no_turn_begins_after_the_end():
    turns, began = Turns(), []
    first = turns.turn()
    first.__enter__()

    def late():
        with suppress(SystemExit), turns.turn():
            began.append(True)

    thread = threading.Thread(target=late)
    thread.start()
    turns.end()
    thread.join(10)
    first.__exit__(None, None, None)
    assert not thread.is_alive() and not began
