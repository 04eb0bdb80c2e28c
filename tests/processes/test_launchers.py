"""A process that srun or mpirun started beside others, without torchrun's variables."""

import pytest
from numerics import build
from torch import distributed

import planc

LAUNCHERS = [
    {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    {"PMI_SIZE": "4", "PMI_RANK": "1"},
]
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.mark.parametrize("variables", LAUNCHERS, ids=lambda v: next(iter(v)))
def test_several_processes_that_torch_does_not_know_of(monkeypatch, variables):
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(planc.PlanError, match="PL460") as caught:
        planc.apply(build("llama"), "llama", device_type="cpu")
    size, rank, *_ = variables
    [found] = caught.value.diagnostics
    assert f"{size} is {variables[size]}, so this is one of several processes" in found.message
    assert f'RANK="${rank}" WORLD_SIZE="${size}"' in found.help
    assert not distributed.is_initialized()


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
