"""Trains a small model under Ray Train on four workers, one of which is killed, and on fewer."""

import json
import os
import signal
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

from planc.integrations.ray import load, planc_trainer, save

BATCH = 7
HERE = Path.cwd()


def build():
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(HERE / "model"))


def train(run, config):
    optimizer = run.optimizer(torch.optim.AdamW(run.model.parameters(), lr=1e-3))
    if (done := load(run, optimizer=optimizer)) is None:
        run.load(HERE / "weights")
    rank, share = distributed.get_rank(), run.accumulation(BATCH, rows=1)
    for step in range(done or 0, config["steps"]):
        if step == 3 and done is None and rank == config["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = torch.randint(128, (BATCH, 16), generator=torch.Generator().manual_seed(step))
        batches = [{"input_ids": tokens[[*p]], "labels": tokens[[*p]]} for p in share.parts]
        loss = run.forward_backward(batches, passes=share.passes).item()
        optimizer.step()
        optimizer.zero_grad()
        save(run, step + 1, {"loss": loss}, optimizer=optimizer)
        if rank == 0:
            with (HERE / f"{config['name']}.jsonl").open("a") as file:
                file.write(json.dumps([step, loss, distributed.get_world_size()]) + "\n")


def fit(name, settings, world_size, steps, *, dies=-1, cpus=1):
    """Runs the trainer up to a step, whose checkpoint Ray then has."""
    result = planc_trainer(
        train,
        build,
        "qwen3",
        overrides=["param_dtype=fp32", *settings],
        world_size=world_size,
        config={"name": name, "steps": steps, "dies": dies},
        scaling_config=ScalingConfig(resources_per_worker={"CPU": cpus}),
        run_config=RunConfig(
            name=name, storage_path=str(HERE / "storage"), failure_config=FailureConfig(1)
        ),
    ).fit()
    assert Path(result.checkpoint.path).name == f"checkpoint_{steps:09}", result


if __name__ == "__main__":
    torch.manual_seed(0)
    build().save_pretrained("weights")
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100_000_000)
    fit("ray_alone", [], 1, 6)
    fit("ray_train", ["tp=2"], 4, 5, dies=3)
    fit("ray_train", [], (2, 4), 6, cpus=2)  # for which there is room for 3
    ray.shutdown()
