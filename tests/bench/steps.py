"""The time and the memory of a training step, of an applied plan beside the same torch by hand.

    python tests/bench/steps.py step|pipeline|context|experts|dispatch|states REPEAT
    python tests/bench/steps.py rows|observation REPEAT
    python tests/bench/steps.py muon|"muon tp" REPEAT
    python tests/bench/steps.py memory hand|planc|whole|chunked

Four ranks, gloo processes for the time, dp_shard 2 and tp 2, a llama of 19M parameters in fp32,
checkpointed. For the time both models live in the same processes, half as wide, and take turns; for
the memory each has a process of its own, and what it allocates is counted: also with a large
vocabulary, with whole logits and with a loss in chunks.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from operator import itemgetter
from pathlib import Path
from unittest import mock

import torch
from applied import by_hand
from axes import AXES, MICROBATCHES, ROWS, llamas, tokens
from torch import distributed, multiprocessing
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from updates import UPDATES, traffic

import planc
from planc.runtime import training_step
from planc.runtime.safeguards import torch_calls
from planc.runtime.safeguards.changes import ModelChanges
from planc.runtime.safeguards.inputs import SameRows
from planc.runtime.safeguards.stage_statistics import observe_statistics

RANKS = 4
SHAPE = {
    "vocab_size": 8_000,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def hand(model):
    by_hand(model, sizes=(1, 2, 2), param=torch.float32)


def applied(model, more="loss_chunks=0"):
    overrides = ["tp=2", "param_dtype=fp32", more]
    planc.apply(model, "llama", overrides=overrides, device_type="cpu")


WAYS = {"hand": hand, "planc": applied}
LARGE = {"whole": applied, "chunked": partial(applied, more="loss_chunks=8")}
"""What is measured with a vocabulary of 64,000 and a batch of 2,048 tokens."""


def build(way, width=512, **more):
    torch.manual_seed(0)
    shape = {**SHAPE, **more, "hidden_size": width, "intermediate_size": width * 11 // 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="eager")).train()
    {**WAYS, **LARGE}[way](model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def step(model, optimizer, tokens):
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def ways_of_a_step():
    """The steps that are compared, by who wrote them."""
    return {way: partial(step, *build(way, width=256), tokens_of_a_step()) for way in WAYS}


def tokens_of_a_step():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SHAPE["vocab_size"], (2, 128), generator=generator)


def timed(ways, repeat):
    """Seconds of the fastest step of each way: a busy machine slows the others by chance.

    The ranks begin each step together. `cpu` are the seconds that a rank's own threads ran, which
    other work on the machine changes less.
    """
    seconds = {f"{way}{kind}": [] for way in ways for kind in ("", " cpu")}
    loss = {}
    for turn in range(repeat + 2):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            distributed.barrier()
            start, own = time.perf_counter(), time.process_time()
            loss[way] = ways[way]()
            own = time.process_time() - own
            distributed.barrier()
            if turn > 1:  # the first ones set FSDP and the optimizer up
                seconds[way].append(time.perf_counter() - start)
                seconds[f"{way} cpu"].append(own)
    if None not in loss.values():  # a rank's part of a batch may have a loss of its own
        assert max(loss.values()) < 1.05 * min(loss.values()), f"they train apart: {loss}"
    return {name: min(values) for name, values in seconds.items()}


def rows(repeat):
    """Median seconds of a step, and of those in which the tensor ranks compare what they read, and
    in which a rank compares its model with that of `apply`: the median of their shares of a step.
    """
    (model, optimizer), tokens = build("planc", width=256), tokens_of_a_step()
    seconds = {"planc": [], "rows": [], "changes": []}

    def noting(name, function):
        def call(*args):
            start = time.perf_counter()
            function(*args)
            seconds[name].append(time.perf_counter() - start)

        return call

    with (
        mock.patch.object(SameRows, "before", noting("rows", SameRows.before)),
        mock.patch.object(ModelChanges, "require", noting("changes", ModelChanges.require)),
    ):
        for _ in range(repeat + 3):
            distributed.barrier()
            start = time.perf_counter()
            step(model, optimizer, tokens)
            seconds["planc"].append(time.perf_counter() - start)
    whole = seconds["planc"][3:]  # rows of the first two are compared at once
    assert all(len(values) == repeat + 3 for values in seconds.values())  # once in each step
    found = {"planc": statistics.median(whole)}
    for name in ("rows", "changes"):
        shares = (part / step for part, step in zip(seconds[name][3:], whole, strict=True))
        found[name] = found["planc"] * statistics.median(shares)
    return found


def observation(repeat):
    """Median seconds of a step in two stages, and of the processor time that the observation of the
    script adds between the passes of a step: to clipping, the optimizer and `zero_grad`.

    Steps with and without it take turns; each is compared with the one before it.
    """
    model, overrides = llamas()[0], ["pp=2", f"microbatches={MICROBATCHES}", "param_dtype=fp32"]
    run = planc.apply(model, "llama", overrides=overrides, device_type="cpu", compare=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    batch = {"input_ids": tokens(ROWS), "labels": tokens(ROWS)}
    observed, begun = False, []

    def observe(*args):
        begun.append(time.thread_time())
        if observed:
            observe_statistics(*args)

    steps, between = [], {True: [], False: []}
    with (
        mock.patch.object(training_step, "observe_statistics", observe),
        mock.patch.object(torch_calls, "observe_statistics", observe),
    ):
        for turn in range(2 * (repeat + 2)):
            observed = bool(turn % 2)
            distributed.barrier()
            begun.clear()
            start = time.perf_counter()
            run.forward_backward([batch])
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            between[observed].append(time.thread_time() - begun[0])
            steps.append(time.perf_counter() - start)
    pairs = zip(between[True][2:], between[False][2:], strict=True)
    added = statistics.median(mine - without for mine, without in pairs)
    return {"planc": statistics.median(steps[4:]), "observation": max(added, 0.0)}


def memory(way):
    """Bytes that torch's CPU allocator holds at most during three steps, on one rank of four.

    Every allocation and release is an event of the profiler, with its size. The process group is
    a fake one: over gloo what is being sent lives for as long as gloo's threads take, which changes
    the peak of the same code by a tenth from run to run. What a rank allocates is the same.
    """
    init = FakeStore()
    distributed.init_process_group("fake", rank=0, world_size=RANKS, store=init)
    more = {"vocab_size": 64_000} if way in LARGE else {}
    shape = (8, 256) if way in LARGE else (2, 128)
    tokens = torch.randint(8_000, shape, generator=torch.Generator().manual_seed(1))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, optimizer = build(way, 256 if way in LARGE else 512, **more)
        gc.collect()
        with record_function("steps"):
            for _ in range(3):
                step(model, optimizer, tokens)
    return most_held(profiler)


def most_held(profiler):
    """The most bytes during what is named `steps`."""
    events = profiler.profiler.kineto_results.events()
    begun = next(e.start_ns() for e in events if e.name() == "steps")
    held = most = 0
    sizes = ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    for when, size in sorted(sizes, key=itemgetter(0)):
        held += size
        most = max(most, held) if when >= begun else 0
    return most


def held(ways):
    """The most bytes that a step of each way allocates on this rank, beside what was there."""
    found = {}
    for way, one in ways.items():
        distributed.barrier()
        with (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
            record_function("steps"),
        ):
            one()
        found[f"{way} bytes"] = most_held(profiler)
    return found


def worker(rank, store, what, repeat, results):
    torch.set_num_threads(1)
    init = distributed.FileStore(store, RANKS)
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS, store=init)
    if what in ("rows", "observation"):
        results.put({"rows": rows, "observation": observation}[what](repeat))
    else:
        ways = {"step": ways_of_a_step, **AXES, **UPDATES}[what]()
        more = traffic if what in UPDATES else held if what == "states" else lambda ways: {}
        results.put(timed(ways, repeat) | more(ways))
    distributed.barrier()
    os._exit(0)  # destroying the process group is slow, and nothing is left to do


def time_of(what, repeat):
    """What `timed` says, of the slowest rank."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        # ends the others when one fails, and raises its error
        multiprocessing.spawn(worker, (store, what, repeat, results), RANKS)
    found = [results.get() for _ in range(RANKS)]
    return {way: max(f[way] for f in found) for way in found[0]}


def main():
    what, argument = sys.argv[1:]
    torch.set_num_threads(1)
    found = {argument: memory(argument)} if what == "memory" else time_of(what, int(argument))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
