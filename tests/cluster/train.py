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

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=6)
options.add_argument("--dies-at", type=int, help="rank 1 is killed there, the first time")
options.add_argument("--losses", type=Path, required=True)
given = options.parse_args()

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
run = planc.apply(model, "qwen3", overrides=["tp=2"], device_type="cpu")
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
checkpoint = given.losses.with_suffix(".checkpoint")
done = run.load(checkpoint, optimizer=optimizer) or 0 if checkpoint.exists() else 0
rank = distributed.get_rank()
for step in range(done, given.steps):
    if step == given.dies_at and done == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(step))
    loss = run.forward_backward([{"input_ids": tokens, "labels": tokens}])
    optimizer.step()
    optimizer.zero_grad()
    run.save(checkpoint, optimizer=optimizer, step=step + 1)
    if rank == 0:
        with given.losses.open("a") as file:
            file.write(json.dumps([step, loss.item()]) + "\n")
