"""Steps of one rank on the GPU under `planc.apply`: `training.py products` or `training.py states`.

Prints JSON. `products`: the time of a step and the losses of a llama of the width of llama 3.1 8B
with products in bf16 and in 8 bits, by recipe, compiled, and two of them not. `states`: time,
memory and parameters of a llama of 0.6B with AdamW's states in fp32, in 8 bits, and on the host.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import planc

PRODUCTS = {
    "bf16": "",
    "tensorwise": "matmul { $blocks.{self_attn,mlp}.*_proj : fp8(recipe = tensorwise) }",
    "rowwise": "matmul { $blocks.{self_attn,mlp}.*_proj : fp8(recipe = rowwise) }",
    "gathered": "matmul { $blocks.{self_attn,mlp}.*_proj : fp8(gather = fp8) }",
}
COMPILED = "compile { $blocks : block }"
STATES = {
    "fp32": "root : adamw",
    "on the host": "root : adamw(offload = states)",
    "int8": "root : adamw(state = int8, block = 256)",
    "int8 on the host": "root : adamw(state = int8, block = 256, offload = states)",
    "bf16": "root : adamw(state = bf16)",
    "muon": "root : adamw\n $blocks.{self_attn,mlp}.*_proj : muon",
}


def plan_of(sections):
    folder = tempfile.mkdtemp()
    path = Path(folder) / "trained.plan"
    path.write_text(f'plan trained for llama\n\nextend "llama"\n\n{sections}\n')
    return str(path)


def steps(sizes, plan, rows, length, count, overrides=()):
    torch.manual_seed(0)
    config = LlamaConfig(rope_theta=500000.0, max_position_embeddings=length, **sizes)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    run = planc.apply(model, plan, overrides=overrides, require="nothing", device_type="cuda")
    optimizer = run.optimizer(lr=1e-4) if "optimizer" in Path(plan).read_text() else None
    optimizer = optimizer or run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    torch.cuda.reset_peak_memory_stats()
    losses, seconds, updates = [], [], []
    tokens = torch.randint(sizes["vocab_size"], (rows, length), device="cuda")
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        run.clip_grad_norm_(1.0)
        torch.cuda.synchronize()
        before = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        updates.append(time.perf_counter() - before)
    sums = [p.detach().double().sum().item() for p in model.parameters()]
    found = {
        "ms of a step": statistics.median(seconds[2:]) * 1e3,
        "ms of the optimizer": statistics.median(updates[2:]) * 1e3,
        "GiB at most": torch.cuda.max_memory_allocated() / 2**30,
        "GiB between steps": torch.cuda.memory_allocated() / 2**30,
        "losses": losses,
        "sum of parameters": sum(sums),
    }
    del model, run, optimizer
    gc.collect()  # a model and its run know each other
    torch.cuda.empty_cache()
    return found


WIDE = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMALL = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def products():
    for name, section in PRODUCTS.items():
        yield f"{name}, compiled", (WIDE, plan_of(f"{section}\n{COMPILED}"), 2, 8192, 6)
    for name in ("bf16", "tensorwise"):
        yield name, (WIDE, plan_of(PRODUCTS[name]), 2, 8192, 6)


def states():
    for name, section in STATES.items():
        yield name, (SMALL, plan_of(f"optimizer {{\n {section}\n}}"), 1, 2048, 6)


def main(what):
    alone = dict(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(alone, MASTER_PORT=str(20000 + os.getpid() % 10000))
    for name, job in {"products": products, "states": states}[what]():
        try:
            found = steps(*job)
        except Exception as error:  # the others are measured all the same
            found = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
