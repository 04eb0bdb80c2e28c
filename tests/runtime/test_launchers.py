"""A process that srun, mpirun or Ray started beside others, without torchrun's variables."""

import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from numerics import build
from torch import distributed

import planc
from planc.runtime.launchers import require_known_to_torch

pytestmark = pytest.mark.slow

LAUNCHERS = [
    {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    {"PMI_SIZE": "4", "PMI_RANK": "1"},
]
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_WORLD_SIZE")


def refused(monkeypatch, variables, **settings):
    """The finding of PL460 in a process with these variables."""
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(planc.PlanError, match="PL460") as caught:
        planc.apply(build("llama"), "llama", device_type="cpu", **settings)
    assert not distributed.is_initialized()
    [found] = caught.value.diagnostics
    return found


@pytest.mark.parametrize("variables", LAUNCHERS, ids=lambda v: next(iter(v)))
def test_several_processes_that_torch_does_not_know_of(monkeypatch, variables):
    found = refused(monkeypatch, variables, overrides=["tp=2"])  # which one rank has no place for
    size, rank, *_ = variables
    assert f"{size} is {variables[size]}, so this is one of several processes" in found.message
    assert f'RANK="${rank}" WORLD_SIZE="${size}"' in found.help


def test_half_of_torchruns_variables(monkeypatch):
    found = refused(monkeypatch, {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0"})
    assert "WORLD_SIZE is 4" in found.message and "MASTER_PORT is not set" in found.message
    found = refused(monkeypatch, {**LAUNCHERS[0], "RANK": "3", "WORLD_SIZE": "16"})
    assert "MASTER_ADDR and MASTER_PORT are not set" in found.message


def test_a_torchrun_for_each_task(monkeypatch):
    torchrun = dict.fromkeys(OURS, "1") | {"RANK": "0", "MASTER_ADDR": "localhost"}
    found = refused(monkeypatch, {**LAUNCHERS[0], **torchrun})
    assert found.message.startswith("SLURM_STEP_NUM_TASKS is 16, and torchrun knows of one node")


def test_a_worker_of_ray_train(monkeypatch):
    context = SimpleNamespace(get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
    found = refused(monkeypatch, {})
    assert found.message.startswith("Ray Train has 2 workers") and "TorchTrainer" in found.help


@pytest.mark.parametrize("error", [RuntimeError("not initialized"), AttributeError("renamed")])
def test_an_error_of_ray_train_is_not_one_worker(monkeypatch, error):
    """Ray raises RuntimeError outside of its workers; after another error their number is unknown,
    and each of several workers would train alone.
    """

    def context():
        raise error

    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=context))
    outside = isinstance(error, RuntimeError)
    with nullcontext() if outside else pytest.raises(AttributeError, match="renamed"):
        require_known_to_torch()


def test_one_process_of_a_launcher_runs_alone(monkeypatch):
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "16")  # of an allocation, in which sbatch runs one script
    try:
        assert planc.apply(build("llama"), "llama", device_type="cpu").lowered.world_size == 1
    finally:
        distributed.destroy_process_group()


STEP = """
import torch, transformers, planc
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    num_attention_heads=8, num_key_value_heads=8, vocab_size=128)
torch.manual_seed(0)
run = planc.apply(transformers.LlamaForCausalLM(config), "llama", overrides=["tp=2"],
    device_type="cpu")
tokens = torch.full((2, 8), run.mesh.get_rank())
run.forward_backward([{"input_ids": tokens, "labels": tokens}])
"""


def test_an_error_of_a_step_is_printed_once_under_torchrun(tmp_path):
    """Each rank raises PL483 by itself, after `planc.apply`."""
    script = tmp_path / "train.py"
    script.write_text(STEP)
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    found = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert found.returncode == 1
    told = found.stderr.split("torch/distributed/run.py")[0]  # what the agent says follows
    assert told.count("error[PL483]") == 1 and f"{script}:9: planc stopped the run" in told
    assert len(re.findall(r"planc: rank \d ends with the error that rank \d reports", told)) == 1
    assert "forward_backward(batch" not in told, "a traceback"
