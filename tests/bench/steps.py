"""The time and the memory of a training step, of an applied plan beside the same torch by hand.

    python tests/bench/steps.py time REPEAT
    python tests/bench/steps.py memory hand|planc

Four gloo processes, dp_shard 2 and tp 2, a llama of 19M parameters in fp32, checkpointed. For the
time both models live in the same processes, half as wide, and take turns; for the memory each has
its own.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from applied import by_hand
from torch import distributed, multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM

import planc

RANKS = 4
SHAPE = {
    "vocab_size": 8_000,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def hand(model):
    by_hand(model, sizes=(1, 2, 2), param=torch.float32)


def applied(model):
    planc.apply(model, "llama", overrides=["tp=2", "param_dtype=fp32"], device_type="cpu")


WAYS = {"hand": hand, "planc": applied}


def build(way, width=512):
    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": width, "intermediate_size": width * 11 // 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="eager")).train()
    WAYS[way](model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def step(model, optimizer, tokens):
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(rank, repeat):
    """Seconds of the fastest step of each way: a busy machine slows the others by chance.

    The ranks begin each step together. `cpu` are the seconds that a rank's own threads ran, which
    other work on the machine changes less.
    """
    tokens = torch.randint(
        SHAPE["vocab_size"], (2, 128), generator=torch.Generator().manual_seed(1)
    )
    made = {way: build(way, width=256) for way in WAYS}
    seconds = {f"{way}{kind}": [] for way in WAYS for kind in ("", " cpu")}
    for turn in range(repeat + 2):
        for way in list(WAYS)[:: 1 if turn % 2 else -1]:
            distributed.barrier()
            start, own = time.perf_counter(), time.process_time()
            step(*made[way], tokens)
            own = time.process_time() - own
            distributed.barrier()
            if turn > 1:  # the first ones set FSDP and the optimizer up
                seconds[way].append(time.perf_counter() - start)
                seconds[f"{way} cpu"].append(own)
    return {name: min(values) for name, values in seconds.items()}


def peak(rank, way):
    """Bytes that three steps take at most, above what the process had before the model."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    model, optimizer = build(way)
    tokens = torch.randint(
        SHAPE["vocab_size"], (2, 128), generator=torch.Generator().manual_seed(1)
    )
    for _ in range(3):
        step(model, optimizer, tokens)
    return {way: status("VmHWM") - before}


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def worker(rank, store, what, argument, results):
    torch.set_num_threads(1)
    init = distributed.FileStore(store, RANKS)
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS, store=init)
    results.put({"time": timed, "memory": peak}[what](rank, argument))
    distributed.barrier()
    os._exit(0)  # torch's farewell is slow, and nothing is left to do


def main():
    what, argument = sys.argv[1:]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        value = int(argument) if what == "time" else argument
        ranks = [
            context.Process(target=worker, args=(rank, store, what, value, results))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        found = [results.get(timeout=600) for _ in ranks]
        for process in ranks:
            process.join()
    print(json.dumps({way: max(f[way] for f in found) for way in found[0]}))


if __name__ == "__main__":
    main()
