"""A rank of a pipeline that is killed in the middle of a step ends the others."""

import os
import signal
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import planc
from planc.runtime.standalone.pipeline import Stages

sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3)
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
settings = ["pp=3", "microbatches=4"]
run = planc.apply(model, "llama", overrides=settings, device_type="cpu", compare=0)
ids = torch.randint(1, 96, (4, 16), generator=torch.Generator().manual_seed(0))
batch = {"input_ids": ids, "labels": ids}
print("loss", float(run.forward_backward([batch])), flush=True)
passes, plain = [0], Stages.run

def dying(self, *args):
    passes[0] += 1
    if self.last and passes[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, *args)

Stages.run = dying
run.forward_backward([batch])
print("never", flush=True)
"""
LIMIT = 120  # seconds: gloo's own limit of a collective is half an hour


def test_a_killed_rank_ends_the_others_with_their_stages(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "train.py"],
            cwd=tmp_path,
            env={**os.environ, **known, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        ranks[2].wait(timeout=400)
        told = [rank.communicate(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[2].returncode == -signal.SIGKILL, told[2][1]
    for number, near in ((0, "1"), (1, "0, 2")):
        out, errors = told[number]
        assert ranks[number].returncode == 1
        assert "loss" in out and "never" not in out
        note = f"in a step of stage {number}, which exchanges tensors with stage {near}"
        assert note in errors, errors
