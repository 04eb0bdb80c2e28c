"""Trains a small llama on a text, and writes its loss curve.

    python docs/demo/train.py --out one.json                              # one process, no planc
    torchrun --nproc-per-node 4 docs/demo/train.py --plan llama --set tp=2 --out four.json

The loop is the same for both: a plan changes the layout of tensors, not the computation. Each byte
of the text is a token.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

import planc

TEXT = Path(__file__).with_name("declaration.txt")
LENGTH, BATCH, STEPS = 128, 8, 120


def build():
    torch.manual_seed(0)  # every rank starts from the same weights
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def batches():
    """The same windows of the text for every run: BATCH rows of LENGTH tokens per step."""
    tokens = torch.tensor(list(TEXT.read_bytes()))
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([tokens[s : s + LENGTH] for s in starts.tolist()])


def train(model, rank, size):
    """One loop for every plan: this rank reads its rows; the losses are means over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = BATCH // size
    losses = []
    for batch in batches():
        mine = batch[rank * rows : (rank + 1) * rows]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if distributed.is_initialized():
            distributed.all_reduce(mean)
            mean /= distributed.get_world_size()
        losses.append(mean.item())
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="without one, the plain model in one process")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # FSDP warns of logits that are views; nothing here changes them in place
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    model, rank, size = build(), 0, 1
    if options.plan:
        run = planc.apply(model, options.plan, overrides=options.set, device_type="cpu")
        rank, size = run.data_rank, run.data_size
        if distributed.get_rank() == 0:
            print(run.describe())
    losses = train(model, rank, size)
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    if first:
        options.out.write_text(json.dumps(losses))
    if distributed.is_initialized():
        distributed.barrier()
        sys.stdout.flush()
        os._exit(0)  # torch's caches hold meshes, and gloo's threads may abort a slow exit


if __name__ == "__main__":
    main()
