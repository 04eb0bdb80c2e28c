"""Real hangs of four gloo processes, explained by what their watchdogs wrote."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hanging
import pytest
from console import call

pytestmark = pytest.mark.slow

LIMIT = 500  # seconds until all files are there: a busy machine imports slowly
CASES = [
    (
        "clip",
        (0, 1, 2, 3),
        [
            "4 of 4 ranks left a dump",
            "rank 1: in all-reduce of 2 int64 over dp_shard * tp",
            "rank 1 has left out before it: all-reduce (sum) of 1 fp32 over dp_shard (clipping)",
            "rank 0: in all-reduce of 1 fp32 over tp\n  clipping",
            "not there: rank 1, which is in all-reduce of 2 int64",
        ],
    ),
    (
        "crossed",
        (0, 1, 2, 3),
        [
            "rank 2: in receive",
            "rank 3: in receive",
            "  pipeline plans/blocks.plan:",
            "each waits for the next: 2 -> 3 -> 2",
        ],
    ),
    (
        "stopped",
        (0, 1, 2),
        [
            "3 of 4 ranks left a dump",
            "rank 3: no dump: ended, stopped, or cut off from the folder",
            "not there: rank 3, which left no dump",
        ],
    ),
    ("killed", (0, 1, 2), ["rank 3: no dump", "has ended with RuntimeError"]),
    ("layer", (0, 1, 2), ["rank 3: no dump", "has ended with RuntimeError", "fsdp"]),
]


def dumped(fault, ranks, folder):
    """Runs four processes until some have written, and one has said where."""
    names, told = {f"rank_{rank}.json" for rank in ranks}, f"`planc hang {folder / 'dumps'} MODEL"
    script = Path(hanging.__file__)
    started = subprocess.Popen(
        [sys.executable, "-W", "ignore", script, fault, folder],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # which the ranks are in, too
    )
    try:
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and not (written(folder) >= names and told in said(folder)):
            time.sleep(0.5)
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    assert written(folder) == names and told in said(folder), said(folder)


def written(folder):
    return {path.name for path in (folder / "dumps").glob("*.json")}


def said(folder):
    return "".join(path.read_text() for path in sorted(folder.glob("*.err")))


@pytest.mark.parametrize(("fault", "ranks", "told"), CASES)
def test_a_hang_is_explained(tmp_path, fault, ranks, told):
    dumped(fault, ranks, tmp_path)
    words = [word for setting in hanging.settings(fault) for word in ("--set", setting)]
    code, out, errors = call("hang", tmp_path / "dumps", tmp_path, "llama", *words)
    assert code == 1, errors
    assert [text for text in told if text not in out] == [], out
