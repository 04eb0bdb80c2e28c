"""`planc.integrations.ray` without Ray: how many workers there are, what they run, and what is
reported. tests/cluster/ray_train.py runs it under Ray.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from loop_plans import SIZES
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

import planc
from planc.integrations.ray import load, planc_trainer, save, workers

SETS = ["param_dtype=fp32"]


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


class Trainer(SimpleNamespace):
    def __init__(self, work, **given):
        super().__init__(work=work, **given)

    def fit(self):
        self.work(self.train_loop_config)


@pytest.fixture
def ray(monkeypatch, tmp_path):
    """The names of Ray that are used, and what was reported to them."""
    train, reported = ModuleType("ray.train"), []
    local = SimpleNamespace(type_name="local")
    storage = SimpleNamespace(storage_filesystem=local, experiment_fs_path=str(tmp_path / "run"))

    def report(metrics, checkpoint, checkpoint_upload_mode):
        assert checkpoint_upload_mode == "no upload"
        reported.append((metrics, checkpoint))

    context = SimpleNamespace(get_storage=lambda: storage, get_world_size=lambda: 1)
    train.get_context = lambda: context
    train.report = report
    train.get_checkpoint = lambda: reported[-1][1] if reported else None
    train.Checkpoint = SimpleNamespace(from_directory=lambda path: SimpleNamespace(path=path))
    train.ScalingConfig = lambda: SimpleNamespace(use_gpu=False, num_workers=1)
    modes = SimpleNamespace(CheckpointUploadMode=SimpleNamespace(NO_UPLOAD="no upload"))
    made = {
        "ray": SimpleNamespace(train=train),
        "ray.train": train,
        "ray.train.torch": SimpleNamespace(TorchTrainer=Trainer),
        "ray.train.v2.api.report_config": modes,
    }
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield SimpleNamespace(reported=reported, storage=storage)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def train(run, config):
    optimizer = run.optimizer(torch.optim.AdamW(run.model.parameters(), lr=config["lr"]))
    for step in range(load(run, optimizer=optimizer) or 0, config["steps"]):
        ids = torch.arange(16).view(2, 8) + step
        loss = run.forward_backward([{"input_ids": ids, "labels": ids}])
        optimizer.step()
        optimizer.zero_grad()
        save(run, step + 1, {"loss": loss.item()}, optimizer=optimizer)


def fit(steps):
    config = {"lr": 1e-2, "steps": steps}
    planc_trainer(train, build, "llama", overrides=SETS, world_size=1, config=config).fit()
    distributed.destroy_process_group()


def test_a_trainer_goes_on_at_the_step_that_was_reported(ray):
    fit(4)
    whole = [metrics["loss"] for metrics, _ in ray.reported]
    assert len({*whole}) == 4
    ray.reported.clear()
    fit(2)
    fit(4)
    assert [metrics["loss"] for metrics, _ in ray.reported] == whole
    assert [path.path.name for _, path in ray.reported][-1] == "checkpoint_000000004"


def test_workers_are_the_ranks_of_the_plan(ray, monkeypatch):
    def count(**how):
        trainer = planc_trainer(train, build, "llama", run_config="one", **how)
        assert trainer.run_config == "one"
        return trainer.scaling_config.num_workers

    assert count(world_size=8, overrides=["tp=2"]) == 8
    assert count(overrides=["dp_shard=2", "tp=2"]) == 4  # the mesh says it
    assert count(world_size=(2, 4), overrides=["tp=2"]) == (2, 4)
    monkeypatch.delitem(sys.modules, "ray.train")
    for sizes in (3, (3, 4), (2, 3)):  # before Ray is asked for anything
        with pytest.raises(planc.PlanError, match="PL303"):
            workers(build, "llama", world_size=sizes, overrides=["tp=2"])


def test_a_storage_that_is_no_folder_is_refused(ray):
    ray.storage.storage_filesystem.type_name = "s3"
    with pytest.raises(ValueError, match="`storage_path` is one, not on s3"):
        fit(1)
    assert not ray.reported


def test_a_checkpoint_that_is_not_written_yet_is_refused(ray):
    with pytest.raises(ValueError, match="leave out asynchronous"):
        save(None, 1, {}, asynchronous=True)
    assert not ray.reported


def test_functions_that_use_planc_are_sent_to_workers():
    assert type(planc) is ModuleType  # cloudpickle sends plain modules by their names
