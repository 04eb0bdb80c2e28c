"""Trains a small model, resumes from its checkpoint, and dies once where it is told to."""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

import planc

BATCH = 3
options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=6)
options.add_argument("--dies-at", type=int, help="rank 1 is killed there, the first time")
options.add_argument("--node-dies-at", type=int, help="node 1 is killed there with its torchrun")
options.add_argument("--losses", type=Path, required=True)
options.add_argument("--set", action="append", default=["param_dtype=fp32"])
given = options.parse_args()

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
run = planc.apply(model, "qwen3", overrides=given.set, device_type="cpu")
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
checkpoint = given.losses.with_suffix(".checkpoint")
done = run.load(checkpoint, optimizer=optimizer) or 0 if checkpoint.exists() else 0
rank, share = distributed.get_rank(), run.accumulation(BATCH, rows=1)
for step in range(done, given.steps):
    if step == given.dies_at and done == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == given.node_dies_at and os.environ.get("NODE") == "1":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    tokens = torch.randint(128, (BATCH, 16), generator=torch.Generator().manual_seed(step))
    batches = [{"input_ids": tokens[[*part]], "labels": tokens[[*part]]} for part in share.parts]
    loss = run.forward_backward(batches, passes=share.passes)
    optimizer.step()
    optimizer.zero_grad()
    run.save(checkpoint, optimizer=optimizer, step=step + 1)
    if rank == 0:
        with given.losses.open("a") as file:
            file.write(json.dumps([step, loss.item(), distributed.get_world_size()]) + "\n")
