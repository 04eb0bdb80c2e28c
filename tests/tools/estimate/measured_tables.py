"""The measured tables as workloads with measured results."""

import atexit
import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from decoder import Decoder, Run, workload

from planc.diagnostics.diagnostic import Sink
from planc.simulate.rank_job import RankRunner
from planc.tools.estimate import profiles
from planc.tools.estimate.workload import ElementSizes, Sharding

DATA = Path(__file__).parent / "data"
PLAYBOOK_MODELS = {
    "1.34B": Decoder(layers=16, hidden=2048, heads=32, ffn=8192, vocabulary=131072, tied=True),
    "3.57B": Decoder(layers=28, hidden=3072, heads=32, ffn=8192, vocabulary=131072, tied=True),
    "8.86B": Decoder(layers=32, hidden=4096, heads=32, ffn=14336, vocabulary=131072),
    "80B": Decoder(layers=80, hidden=8192, heads=64, ffn=28672, vocabulary=131072),
}
"""nanotron's shapes; the names are their numbers of parameters."""


def playbook_model(name):
    """The shape with the number of parameters that a row names, such as `3.57B` or `80.0B`."""
    billions = float(name.removesuffix("B"))
    found = min(PLAYBOOK_MODELS.values(), key=lambda m: abs(m.parameters / 1e9 - billions))
    assert abs(found.parameters / 1e9 / billions - 1) < 0.01, name
    return found


@dataclass(frozen=True)
class Measured:
    """One run: its row, its work, and what was measured, None where it crashed."""

    row: dict
    work: object
    tokens_per_second: float | None = None
    seconds: float | None = None


@cache
def runner():
    """The process that runs ranks, one for all rows."""
    made = RankRunner()
    atexit.register(made.__exit__)
    return made


def hardware(name):
    sink = Sink()
    found = profiles.hardware(name, sink)
    assert found, sink.diagnostics
    return found


def stack(name):
    """planc's own stack, or that of a published run."""
    own, sink = DATA / f"{name}.toml", Sink()
    found = profiles.stack(str(own) if own.exists() else name, sink)
    assert found, sink.diagnostics
    return found


def playbook(path=DATA / "playbook_3.57B.csv"):
    software = stack("nanotron")
    precision = ElementSizes(rest=2, compute=2, reduce=4, states=12)
    with path.open() as file:
        for row in csv.DictReader(file):
            run = Run(
                data=int(row["dp"]),
                tensor=int(row["tp"]),
                pipeline=int(row["pp"]),
                micro_batch=int(row["mbs"]),
                micro_batches=int(row["grad_acc"]),
                sequence=4096,
                sharding=Sharding.OPTIMIZER if row["zero"] == "1" else Sharding.REPLICATED,
                precision=precision,
            )
            crashed = row["tok_s_gpu"] in ("", "nan")
            yield Measured(
                row=row,
                work=workload(playbook_model(row["model"]), run, software),
                tokens_per_second=None if crashed else float(row["tok_s_gpu"]),
            )


def vtrain(path=DATA / "vtrain_a100_sample.csv"):
    """GPT models of Megatron-DeepSpeed: learned positions, a vocabulary of 51,200, fp16."""
    software = stack("megatron")
    precision = ElementSizes(rest=2, compute=2, reduce=2, states=12)
    with path.open() as file:
        for row in csv.DictReader(file):
            size = {key: int(value) for key, value in row.items() if not key.startswith("iter")}
            model = Decoder(
                layers=size["# layers"],
                hidden=size["hidden size"],
                heads=size["attention heads"],
                ffn=4 * size["hidden size"],
                vocabulary=51200,
                tied=True,
                gated=False,
                positions=size["sequence length"],
            )
            data, micro = size["data parallelism"], size["micro batch"]
            run = Run(
                data=data,
                tensor=size["tensor parallelism"],
                pipeline=size["pipeline parallelism"],
                micro_batch=micro,
                micro_batches=size["global batch"] // (micro * data),
                sequence=size["sequence length"],
                sharding=Sharding.REPLICATED,
                precision=precision,
                sequence_parallel=False,
            )
            seconds = float(row["iteration time (ms)"]) / 1e3
            yield Measured(row=row, work=workload(model, run, software), seconds=seconds)


def accelerator(name):
    """The measurements of one accelerator, `h100` or `h200`."""
    return json.loads((DATA / f"{name}.json").read_text())
