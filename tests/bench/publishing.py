"""Sends the weights of a model from four training ranks to an engine of four, in two ways.

    python -W ignore tests/bench/publishing.py [--layers 72] [--repeat 3]

`planc` is `transfer.publish()`. `usual` gathers each tensor on all training ranks, rank 0 casts it
and broadcasts it to the ranks of the engine, and each copies its slices. Eight gloo processes; the
ways take turns in the same processes. Prints medians of the slowest process and of the largest
growth of a process's own memory on either side, and the bytes that training ranks send. 12 layers
have 239 million parameters, 72 layers 1.2 billion.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
from loading import SHAPE, Peak
from rich.console import Console
from rich.table import Table
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

import planc
from planc.answers.transfer import transfer_table

RANKS = 4
SERVE = (
    'plan engine for llama\n\nextend "serve/vllm.plan"\n\nserve vllm on tp = 4, dtype bf16 {\n}\n'
)
SETS = ["param_dtype=fp32", "recompute=false"]
LAYERS = 72
SIDES = ("training", "engine")
BUCKET = 32 << 20
SECONDS = 600


class Usual:
    """The group of rank 0 of the training run and all ranks of the engine.

    Args:
        place: 0 for the training rank, else 1 more than the rank of the engine.
    """

    def __init__(self, port, place):
        limit = timedelta(seconds=SECONDS)
        store = distributed.TCPStore("127.0.0.1", port, None, place == 0, limit, False)
        self.group = distributed.ProcessGroupGloo(store, place, RANKS + 1, limit)

    def broadcast(self, tensor):
        self.group.broadcast(tensor, 0).wait()


def train(rank, folder, ports, layers, repeat, results):
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank)}
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    config = AutoConfig.for_model("llama", **shape(layers))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    run = planc.apply(model, "llama", overrides=SETS, compare=0, require="nothing")
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_()
    address = f"127.0.0.1:{ports[0]}"
    transfer = run.transfer(
        f"{folder}/engine.plan", address=address, bucket=BUCKET, seconds=SECONDS
    )
    usual = Usual(ports[1], 0) if rank == 0 else None
    names = [name for name, _ in model.named_parameters()]

    def gather():
        sent = 0
        for parameter in map(model.get_parameter, names):
            full = parameter.detach().full_tensor()
            if usual is not None:
                full = full.bfloat16()
                usual.broadcast(full)
                sent += full.nbytes * RANKS
        return sent

    def publish():
        before = transfer.counts.bytes
        transfer.publish()
        return transfer.counts.bytes - before

    for turn, way, work in turns(repeat, {"planc": publish, "usual": gather}):
        results.put((way, "training", turn, *measure(work)))


def serve(rank, folder, ports, layers, repeat, results):
    torch.set_num_threads(1)
    engine = planc.join_transfer(f"127.0.0.1:{ports[0]}", rank=rank, seconds=SECONDS)
    usual = Usual(ports[1], rank + 1)
    slices = json.loads((Path(folder) / f"slices-{rank}.json").read_text())
    tensors = {name: torch.zeros_like(t) for name, t in engine.tensors.items()}

    def receive():
        engine.receive()
        return 0

    def load():
        for shape, places in slices:
            full = torch.empty(shape, dtype=torch.bfloat16)
            usual.broadcast(full)
            for key, local, box in places:
                tensors[key][ranges(local)] = full[ranges(box)]
        return 0

    for turn, way, work in turns(repeat, {"planc": receive, "usual": load}):
        results.put((way, "engine", turn, *measure(work)))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in engine.tensors.items())
    results.put(("equal", "engine", 0, 0, 0, 0))


def ranges(box):
    return tuple(slice(*limits) for limits in box)


def turns(repeat, works):
    """The ways in turn; the first turn, which allocates, does not count."""
    for turn in range(repeat + 1):
        yield from ((turn, way, work) for way, work in works.items())


def measure(work):
    with Peak() as peak:
        began = time.perf_counter()
        sent = work()
        seconds = time.perf_counter() - began
    return seconds, peak.grown, sent


def shape(layers):
    values = {key: value for key, value in SHAPE.items() if key != "model_type"}
    return {**values, "num_hidden_layers": layers}


def write_slices(folder, layers):
    """For each rank of the engine: the shape of each full tensor, in the model's order, and its
    places in the rank's tensors.
    """
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape(layers)})
    )
    answer = transfer_table(folder, "llama", folder / "engine.plan", world_size=RANKS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape(layers)))
    places = {}
    for flow in answer.table.flows:
        for index in flow.indices:
            for move in flow.moves:
                box, local = move.to.box, move.to.local
                for rank in move.targets:
                    by_name = places.setdefault(rank, {}).setdefault(flow.hub.format(*index), {})
                    by_name[move.to.key.format(*index), local, box] = None
    for rank, by_name in places.items():
        rows = [(list(t.shape), [*by_name[name]]) for name, t in model.named_parameters()]
        (folder / f"slices-{rank}.json").write_text(json.dumps(rows))


def find_ports():
    stores = [distributed.TCPStore("127.0.0.1", 0, None, True) for _ in range(2)]
    return [store.port for store in stores]


def figures(layers, repeat):
    """(seconds, largest growth of training ranks, of the engine's, bytes sent) of each way."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "planc", "loading"])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "engine.plan").write_text(SERVE)
        write_slices(folder, layers)
        results, ports = context.Queue(), find_ports()
        processes = [
            context.Process(
                target=work, args=(rank, scratch, ports, layers, repeat, results), daemon=True
            )
            for rank in range(RANKS)
            for work in (train, serve)
        ]
        for process in processes:
            process.start()
        rows = [results.get(timeout=SECONDS) for _ in range(4 * RANKS * (repeat + 1) + RANKS)]
        for process in processes:
            process.join(30)
            process.kill()
    assert sum(way == "equal" for way, *_ in rows) == RANKS
    return {way: summarize([row for row in rows if row[0] == way]) for way in ("planc", "usual")}


def summarize(rows):
    turns = sorted({turn for _, _, turn, *_ in rows} - {0})
    rows = [row for row in rows if row[2]]
    slowest, *peaks = (
        statistics.median(
            max(row[column] for row in rows if row[2] == turn and row[1] in sides) for turn in turns
        )
        for column, sides in ((3, SIDES), (4, SIDES[:1]), (4, SIDES[1:]))
    )
    return slowest, *peaks, sum(row[5] for row in rows) / len(turns)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    measured = figures(options.layers, options.repeat)
    table = Table(title=f"publish from 4 ranks to 4 others, medians of {options.repeat}")
    for heading in ("way", "seconds", "peak training", "peak engine", "sent"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way, (seconds, *sizes) in measured.items():
        table.add_row(way, f"{seconds:.2f}", *(f"{size / 2**20:,.0f} MiB" for size in sizes))
    Console(width=110).print(table)
    ours, usual = measured["planc"], measured["usual"]
    time_ratio, peak_ratio = ours[0] / usual[0], max(ours[1:3]) / max(usual[1:3])
    print(f"time {time_ratio:.2f} of the usual way (limit 0.5), peak {peak_ratio:.2f} (limit 0.3)")
    return int(time_ratio > 0.5 or peak_ratio > 0.3)


if __name__ == "__main__":
    sys.exit(main())
