"""What `make bench` counts, where a count can be held exactly, and how it measures."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = Path(__file__).parent / "steps.py"


@pytest.fixture
def bench():
    """The module of `make bench`."""
    spec = importlib.util.spec_from_file_location("bench_run", STEPS.with_name("run.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_ratio_is_of_one_turn(bench):
    """A machine that is three times as slow in one turn slows both sides of its pair."""
    assert bench.middle([(1.0, 10.0), (3.3, 30.0), (1.2, 10.0)]) == (3.3, 30.0)


def test_every_shipped_shape_is_checked_cold(bench, tmp_path, monkeypatch):
    """Each beside the import of the library that its model comes from, with an empty cache."""
    caches, imports = [], []

    def timed(command, environment):
        if "check" not in command:
            imports.append(command[2])
            return 2.0
        caches.append(environment["PLANC_CACHE_DIR"])
        return {"gemma-3-4b": 9.0, "flux.1-dev": 3.0}.get(command[4], 2.6)

    monkeypatch.setattr(bench, "timed", timed)
    worst, median = bench.first_checks(tmp_path, bench.SHAPES)
    assert worst == ("check, cold, the worst shape: gemma-3-4b", 9.0, 2.0, 2.0)
    assert median == (f"check, cold, the median of {len(bench.SHAPES)} shapes", 2.6, 2.0, 1.4)
    assert len(bench.SHAPES) > 100 and len({*caches}) == len(bench.SHAPES)
    assert "from diffusers import FluxTransformer2DModel" in imports


def test_processor_time_is_that_of_the_command(bench):
    work = "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(0.3)"
    assert 0.3 <= bench.timed([sys.executable, "-c", work], dict(os.environ)) < 0.5


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
