"""The script of docs/training.md, unchanged under plans of every axis, on up to eight processes."""

import contextlib
import os
import socket
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from loop_plans import (
    EXPERTS,
    LONG,
    MIXTURES,
    PLANS,
    ROWS,
    SCRIPT,
    arguments,
    saved,
    steps_of,
    weights_of,
)

pytestmark = pytest.mark.slow

SECONDS = 600


def rank(number, count, port, folder, argv):
    """Runs the script as torchrun would, with what it prints in a file of the rank's own."""
    os.chdir(folder)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    sys.argv = argv
    with (folder / f"{number}.printed").open("w") as file, contextlib.redirect_stdout(file):
        exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
    os._exit(0)  # gloo sometimes aborts as the interpreter goes (see test_saving.py)


def run(folder, name, ranks, plan, settings, weights):
    """(loss, norm) of three steps on processes of their own, and the weights that they export."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "planc"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = arguments(folder / name, plan, settings, weights)
    started = [
        context.Process(target=rank, args=(number, ranks, port, folder, argv), daemon=True)
        for number in range(ranks)
    ]
    for process in started:
        process.start()
    end = time.monotonic() + SECONDS
    for process in started:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert codes == [0] * ranks, (name, codes)
    return steps_of((folder / "0.printed").read_text()), weights_of(folder / name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process gives, by family; the folder has the plan, the data set and the weights."""
    folder = Path(tmp_path_factory.mktemp("loop"))
    (folder / "long.plan").write_text(LONG)
    (folder / "rows.py").write_text(ROWS)
    found = {}

    def of(family):
        if family not in found:
            kind, more = ("Mixtral", EXPERTS) if family == "mixtral" else ("Llama", {})
            weights = saved(folder / f"{family} weights", kind, **more)
            found[family] = (folder, weights, run(folder, family, 1, family, [], weights))
        return found[family]

    return of


@pytest.mark.parametrize("name", [*PLANS, *MIXTURES])
def test_the_script_trains_the_same(name, alone):
    ranks, plan, settings = (PLANS | MIXTURES)[name]
    folder, weights, (steps, right) = alone("mixtral" if name in MIXTURES else "llama")
    assert len(steps) == 3
    found, tensors = run(folder, name, ranks, plan, settings, weights)
    assert found == [pytest.approx(line, rel=1e-4) for line in steps]
    assert tensors.keys() == right.keys()
    for key, value in right.items():
        torch.testing.assert_close(tensors[key], value, rtol=1e-3, atol=2e-5)
