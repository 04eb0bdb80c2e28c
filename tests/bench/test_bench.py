"""What `make bench` counts, where a count can be held exactly: no test is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = Path(__file__).parent / "steps.py"


def counted(*words):
    command = [sys.executable, "-W", "ignore", str(STEPS), *words]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_step_under_a_plan_holds_what_the_same_torch_by_hand_holds():
    by_hand, applied = (counted("memory", way)[way] for way in ("hand", "planc"))
    assert by_hand > 100 * 2**20  # the steps, and not an empty profile
    assert abs(applied - by_hand) < 2**16


@pytest.mark.slow
@pytest.mark.parametrize(("what", "gathers"), [("muon", 7), ("muon tp", 14)])
def test_muon_by_owners_sends_less_than_dtensors_and_less_than_gathering(what, gathers):
    """A rank sends what it holds of the matrices of others, and the updates of its own."""
    square, wide = 4 * 256 * 256, 4 * 256 * 704
    every = 4 * square + 3 * wide  # a rank holds a quarter of each
    owned = wide + square  # the most of a rank: three own a wide one, the fourth three squares
    found = counted(what, "1")
    assert found["owners bytes"] == every // 4 - owned // 4 + owned * 3 // 4
    assert found["owners calls"] == 2
    assert found["gathered bytes"] == every * 3 // 4
    assert found["gathered calls"] == gathers
    assert found["dtensors bytes"] > found["gathered bytes"]
    assert found["dtensors calls"] > found["gathered calls"]
