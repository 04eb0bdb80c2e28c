"""What `make bench` counts, where a count can be held exactly: no test is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = Path(__file__).parent / "bench" / "steps.py"


def counted(way):
    command = [sys.executable, "-W", "ignore", str(STEPS), "memory", way]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])[way]


@pytest.mark.slow
def test_a_step_under_a_plan_holds_what_the_same_torch_by_hand_holds():
    by_hand, applied = counted("hand"), counted("planc")
    assert by_hand > 100 * 2**20  # the steps, and not an empty profile
    assert abs(applied - by_hand) < 2**16
