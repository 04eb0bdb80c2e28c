"""What only a GPU shows: a loss in chunks, random numbers by rank, and a plan that trains.

    python tests/gpu/losses.py

Prints JSON: milliseconds and the most memory of head and loss, forward and backward, in bf16, with
the largest relative error of the gradients beside whole logits; whether ranks draw as
they should on CUDA; and six steps of a llama of 1.0B parameters under `planc.apply` on one rank.
"""

import json
import os
import statistics
import time
from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import planc
from planc.runtime.standalone.loss import LossTerms, chunked_loss
from planc.sections.draws import standalone as rng

SHAPES = ((8192, 4096, 128_256), (8192, 2304, 256_000), (4096, 1024, 151_936))
"""Tokens, features, entries of the vocabulary: llama 3 8B, gemma 2 2B, qwen3 0.6B."""


def measured(function):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"ms": statistics.median(seconds) * 1e3, "GiB": most / 2**30}


def losses(tokens, features, vocabulary):
    torch.manual_seed(0)
    kind = dict(device="cuda", dtype=torch.bfloat16)
    head = torch.nn.Linear(features, vocabulary, bias=False, **kind)
    hidden = torch.randn(tokens, features, requires_grad=True, **kind)
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    labels[:100] = -100

    def step(chunks):
        head.weight.grad = hidden.grad = None
        if chunks:
            loss = chunked_loss(head, hidden, labels, LossTerms(chunks=chunks)).sum()
        else:
            loss = cross_entropy(head(hidden).float(), labels, reduction="sum")
        (loss / tokens).backward()

    found = {"whole": measured(lambda: step(0))}
    right = [hidden.grad.float(), head.weight.grad.float()]
    for chunks in (1, 4, 8, 16):
        row = found[f"{chunks} chunks"] = measured(lambda chunks=chunks: step(chunks))
        mine = [hidden.grad.float(), head.weight.grad.float()]
        both = zip(mine, right, strict=True)
        row["error"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in both)
    return found


def draws():
    """Of four ranks: a common draw, one by rank, a common one again."""
    found = []
    for rank in range(4):
        torch.cuda.manual_seed(123)
        first = torch.rand(4096, device="cuda")
        rng.draw(True, rank, "cuda")
        own = torch.rand(4096, device="cuda")
        rng.draw(False, rank, "cuda")
        found.append((first, own, torch.rand(4096, device="cuda")))
    common = all(torch.equal(found[0][i], one[i]) for one in found for i in (0, 2))
    by_rank = torch.corrcoef(torch.stack([own for _, own, _ in found])) - torch.eye(4).cuda()
    return {"common is equal": common, "correlation by rank": float(by_rank.abs().max())}


def recomputed():
    """Whether a checkpoint draws again what the forward pass drew."""
    layers = (torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 64))
    model = torch.nn.Sequential(*layers).cuda()
    mesh = SimpleNamespace(device_type="cuda", get_local_rank=lambda: 1)
    rng.draw_by_rank(model, mesh, inside=True, after=False)
    inputs = torch.randn(8, 64, device="cuda")

    def gradients(run):
        model.zero_grad()
        torch.cuda.manual_seed(5)
        run(inputs).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    again = gradients(lambda value: checkpoint(model, value, use_reentrant=False))
    return all(map(torch.equal, gradients(model), again))


def trained(loss_chunks):
    config = AutoConfig.for_model(
        "llama",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    run = planc.apply(model, "llama", overrides=[f"loss_chunks={loss_chunks}"])
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    torch.cuda.reset_peak_memory_stats()
    seconds, seen = [], []
    for step in range(6):
        torch.manual_seed(step)
        tokens = torch.randint(128_256, (2, 4096), device="cuda")
        start = time.perf_counter()
        items = run.num_items_in_batch(tokens)
        loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=items).loss
        loss.backward()
        norm = run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
        seconds.append(time.perf_counter() - start)
    most = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": statistics.median(seconds) * 1e3, "GiB": most, "loss, norm": seen}


def main():
    alone = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    os.environ.update(alone, LOCAL_RANK="0")
    found = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    found |= {" x ".join(map(str, shape)): losses(*shape) for shape in SHAPES}
    found |= {"draws": draws(), "recomputed alike": recomputed()}
    found |= {f"steps, {chunks} chunks": trained(chunks) for chunks in (0, 8)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
