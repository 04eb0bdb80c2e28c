"""A process that is killed, or stopped, in the middle of a transfer: all others raise."""

import re
import signal
import time
from multiprocessing import get_context
from queue import Empty

import lost_jobs
import pytest
from test_transfer import free_address, written
from tiny_engines import LLAMA

pytestmark = pytest.mark.slow
BUCKET = 3
SECONDS = 150
CASES = {
    "a killed rank": ("training run", 1, signal.SIGKILL),
    "a killed rank with the store": ("training run", 0, signal.SIGKILL),
    "a killed engine": ("engine", 1, signal.SIGKILL),
    "a stopped engine": ("engine", 0, signal.SIGSTOP),
    "a stopped rank with the store": ("training run", 0, signal.SIGSTOP),
}


def play(folder, lost, number, number_of_signal):
    """What the other processes report, by side and rank."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "planc", "lost_jobs"])
    plan, address = written(folder, LLAMA, {"tp": 2, "kv": 4}), free_address()
    results, processes = context.Queue(), []
    for rank in range(2):
        for side in ("training run", "engine"):
            ending = (BUCKET, number_of_signal) if (side, rank) == (lost, number) else None
            common = (address, ending, results)
            work, given = lost_jobs.serve, (rank, *common)
            if side == "training run":
                work, given = lost_jobs.train, (rank, folder, LLAMA, ["tp=2"], plan, *common)
            processes.append(context.Process(target=work, args=given, daemon=True))
            processes[-1].start()
    found, end = {}, time.monotonic() + SECONDS
    try:
        while len(found) < 3 and time.monotonic() < end:
            try:
                side, rank, *report = results.get(timeout=1)
            except Empty:
                continue
            found[side, rank] = report
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.parametrize("case", CASES)
def test_all_others_raise(tmp_path, case):
    """Each names the process, its bucket and a tensor, within its time limit; the engine's tensors
    are marked as incomplete.
    """
    side, number, signal_sent = CASES[case]
    found = play(tmp_path, side, number, signal_sent)
    assert len(found) == 3 and (side, number) not in found
    lost = re.escape(f"rank {number} of the {side} stopped")
    bucket = r"\d+" if "store" in case else BUCKET  # else each knows its own next bucket alone
    exact = rf"in bucket {bucket}, in which it (sends|receives) (model|lm_head)\.[\w.]*weight: "
    follows = (
        r", whose store does not answer \(rank \d of the [\w ]* stopped in bucket \d+, in which"
    )
    for place, (text, seconds, engine) in found.items():
        assert text.startswith("error[PL698]"), (place, text)
        ends = f" {exact}|{follows}" if "store" in case else f" {exact}"
        assert re.search(f"{lost}({ends})", text), (place, text)
        assert seconds < (lost_jobs.LIMIT + 12 if signal_sent == signal.SIGSTOP else 12), place
        if engine is not None:
            version, marked = engine
            assert version == 1 and "the transfer after version 1 did not complete" in marked
