"""A run that goes on with the ranks that are left: 4, 3 and 4 processes, with a kill between."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, signal, sys
from pathlib import Path

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

import planc

BATCH, STEPS = 8, 6
dies = dict(zip(("rank", "step"), map(int, sys.argv[1:])))
torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
run = planc.apply(model, "llama", overrides=["param_dtype=fp32"], device_type="cpu")
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
folder = Path("last")
start = run.load(folder, optimizer=optimizer) if folder.exists() else 0
tokens = torch.randint(1, 96, (BATCH * STEPS, 16), generator=torch.Generator().manual_seed(1))
labels = tokens.clone()
for number, row in enumerate(labels):
    row[: number % 14] = -100
share, rank = run.accumulation(BATCH, rows=1), distributed.get_rank()
for step in range(start, STEPS):
    if dies == {"rank": rank, "step": step}:
        os.kill(os.getpid(), signal.SIGKILL)
    rows = map(list, share.batches(step))
    batches = [{"input_ids": tokens[p], "labels": labels[p]} for p in rows]
    loss = run.forward_backward(batches, passes=share.passes)
    norm = run.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    run.save(folder, optimizer=optimizer, step=step + 1)
    if rank == 0:
        line = [step, distributed.get_world_size(), loss.item(), norm.item()]
        with Path("losses.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\\n")
run.export("export")
sys.stdout.flush()
os._exit(0)  # gloo sometimes aborts as the interpreter goes
"""
LIMIT = 240  # seconds: gloo's own limit of a collective is half an hour


def start(folder, ranks, *dies):
    """The exit codes of some processes, the rank and the step of the one that is killed given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "train.py", *map(str, dies)],
            cwd=folder,
            env={**os.environ, **known, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=(folder / f"{rank}.errors").open("w"),
        )
        for rank in range(ranks)
    ]
    try:
        return [process.wait(timeout=LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()


def trained(folder, *starts):
    """(step, ranks, loss, norm) of each step, and the weights at the end."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    for ranks, *dies in starts:
        codes = start(folder, ranks, *dies)
        said = (folder / "0.errors").read_text()
        if dies:
            assert codes[dies[0]] == -signal.SIGKILL and all(codes), (codes, said)
        else:
            assert codes == [0] * ranks, (codes, said)
    lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    return lines, load_file(folder / "export" / "model.safetensors")


def test_ranks_that_are_killed_and_come_back_leave_the_losses_as_they_are(tmp_path):
    alone, right = trained(tmp_path / "alone", (1,))
    # rank 3 dies in the third step, and rank 0 in the fifth, each while the others wait for it
    lines, weights = trained(tmp_path / "elastic", (4, 3, 2), (3, 0, 4), (4,))
    assert [(step, ranks) for step, ranks, *_ in lines] == [
        *((step, 4) for step in (0, 1)),
        *((step, 3) for step in (2, 3)),
        *((step, 4) for step in (4, 5)),
    ]
    for found, expected in zip(lines, alone, strict=True):
        assert found[0] == expected[0]
        assert found[2:] == pytest.approx(expected[2:], rel=1e-4)
    assert weights.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5)
