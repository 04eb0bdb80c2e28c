"""A run over NCCL that saves while it trains, and one that goes on from what it saved.

    PYTHONPATH=tests/gpu/shared:. torchrun --nproc-per-node 4 tests/gpu/saving.py FOLDER

Prints whether the parameters of both are the same bits.
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import planc

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = """plan saved for llama

extend "llama"

optimizer {
    root                           : adamw(state = int8, block = 16, offload = states)
    $blocks.{self_attn,mlp}.*_proj : muon
}
"""
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def made(plan):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    run = planc.apply(
        model, plan, overrides=["tp=2"], require="proved", prove=True, device_type=DEVICE
    )
    return model, run, run.optimizer(lr=1e-3)


def train(model, run, optimizer, steps):
    losses = []
    for step in steps:
        numbers = torch.Generator().manual_seed(100 * step + run.data_rank)
        ids = torch.randint(512, (2, 64), generator=numbers).to(DEVICE)
        loss = run.forward_backward([{"input_ids": ids, "labels": ids}])
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def main(folder):
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    distributed.init_process_group(distributed.get_default_backend_for_device(DEVICE))
    folder = Path(folder)
    if distributed.get_rank() == 0:
        (folder / "saved.plan").write_text(PLAN)
    distributed.barrier()
    plan = str(folder / "saved.plan")
    first = made(plan)
    train(*first, range(2))
    first[1].save(folder / "step2", optimizer=first[2], asynchronous=True)
    losses = train(*first, range(2, 4))
    first[1].finish_save()
    second = made(plan)
    second[1].load(folder / "step2", optimizer=second[2])
    again = train(*second, range(2, 4))
    pairs = zip(first[0].parameters(), second[0].parameters(), strict=True)
    local = [[t.to_local() if isinstance(t, DTensor) else t for t in pair] for pair in pairs]
    same = all(torch.equal(a, b) for a, b in local)
    print(f"rank {distributed.get_rank()}: losses {losses} and {again}, same bits: {same}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
