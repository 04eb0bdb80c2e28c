"""What tensors hold at most in the steps of four ranks, beside the estimate.

    python tests/tools/estimate/measured_peaks.py [WORD]

measures the runs whose name has the word, writes the bytes of each place of the pipeline into
`data/cpu_peaks.json`, and prints the table of docs/generated/estimate-tables.md. Ranks are threads
of one process, which exchange what processes would. A rank's peak is that of the storages that its
operators make, over a second step, in each thread: the profiler counts no single threads, and over
gloo what is being sent lives for as long as the threads of gloo take.
"""

import copy
import json
import sys
import tempfile
import weakref
from math import prod
from pathlib import Path
from statistics import median

from measured_tables import DATA, runner

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.ops.base import AxisRole
from planc.simulate.rank_job import RankStep
from planc.tools.estimate.answer import Request, answer
from planc.tools.estimate.from_plan import Batch
from planc.tools.measure.count import count

RANKS, ROWS, TOKENS = 4, 16, 128
PEAKS = DATA / "cpu_peaks.json"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
PLAN = """plan measured for llama

let block = model.layers.*
option schedule     = "1f1b"
option microbatches = 8
option attention    = "all_gather"
option recompute    = false
option param_dtype  = "fp32"

mesh {
    optional pp = 1
    dp_shard    = auto
    cp          = 1
}

pipeline on pp {
    schedule     = schedule
    microbatches = microbatches
    stages       = even($block, each = when schedule in ["gpipe", "1f1b"] then 1 else 2)
}

context on cp {
    attention = attention
}

when recompute {
    checkpoint {
        $block : full
    }
}

fsdp on dp_shard * cp {
    precision(param = param_dtype, reduce = fp32)
    $block : unit(reshard = except_last)
    when config.tie_word_embeddings {
        group(model.embed_tokens, model.norm, lm_head) : unit(reshard = never)
    } else {
        model.embed_tokens         : unit
        group(model.norm, lm_head) : unit(reshard = never)
    }
    root   : unit(reshard = never)
}
"""
WHOLE, CHECKPOINTS = ("recompute=false",), ("recompute=true",)
RUNS = {
    "fsdp": (LLAMA, PLAN, ()),
    "pp 2": (LLAMA, PLAN, ("pp=2",)),
    "pp 4": (LLAMA, PLAN, ("pp=4",)),
    "pp 2, zbv": (LLAMA, PLAN, ("pp=2", "schedule=zbv")),
    **{
        f"pp 2, {name}, checkpoints": (LLAMA, PLAN, ("pp=2", *CHECKPOINTS, schedule))
        for name, schedule in (
            ("zbv", "schedule=zbv"),
            ("zero_bubble", "schedule=zero_bubble"),
        )
    },
    "cp 2": (LLAMA, PLAN, ("cp=2",)),
    "cp 4, ulysses": (LLAMA, PLAN, ("cp=4", "attention=ulysses")),
    "cp 4, ring": (LLAMA, PLAN, ("cp=4", "attention=ring")),
    "pp 2, cp 2": (LLAMA, PLAN, ("pp=2", "cp=2")),
    "ep 2": (MIXTRAL, "mixtral", ("ep=2", *WHOLE)),
    "ep 4": (MIXTRAL, "mixtral", ("ep=4", *WHOLE)),
}
"""Model, plan and settings of each run; a text with lines is a plan."""


def written(name, folder):
    """A model's folder, a plan and settings."""
    config, plan, settings = RUNS[name]
    (folder / "config.json").write_text(json.dumps(config))
    if "\n" in plan:
        (folder / "measured.plan").write_text(plan)
        plan = str(folder / "measured.plan")
    return str(folder), plan, settings


def compiled(name):
    sink = Sink()
    with tempfile.TemporaryDirectory() as folder:
        model, plan, settings = written(name, Path(folder))
        made = compile_plan(model, plan, sink, world_size=RANKS, settings=settings)
    assert made.applied, sink.diagnostics
    return made


def estimated(name):
    sink = Sink()
    batch = Batch(global_batch=ROWS, sequence=TOKENS)
    found = answer(*compiled(name).applied, Request(batch=batch), sink)
    assert found, sink.diagnostics
    return found.estimate


def counted(name):
    """Bytes of the peak at each place of the pipeline, of a rank that is run."""
    made = compiled(name)
    ways = prod(axis.size for axis in made.plan.mesh.of_role(AxisRole.DATA))
    step = RankStep(rows=ROWS // ways, tokens=TOKENS, micro_batches=1, dtype="float32")
    return [rank.peak for rank in count(made, step, runner())]


def counting():
    """A mode that knows the storages of its thread: `peak` is the most bytes of them at once."""
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.storages, self.peak = weakref.WeakSet(), 0

        def add(self, tensors):
            new = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
            if any(storage not in self.storages for storage in new):
                self.storages.update(new)
                self.peak = max(self.peak, sum(s.nbytes() for s in self.storages))

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(t, DTensor) for t in types):
                return NotImplemented  # its local operators come here
            out = func(*args, **(kwargs or {}))
            self.add(tree_leaves(out))
            return out

    return Counting()


def measure(name):
    """Bytes of the peak at each place of the pipeline; of equal ranks the least, since one of them
    makes the copies of all in a collective of threads.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import AutoConfig, AutoModelForCausalLM

    import planc
    from planc.simulate.random_numbers import RankRandom
    from planc.simulate.thread_ranks import run_ranks

    places = {}
    with tempfile.TemporaryDirectory() as folder:
        path, plan, settings = written(name, Path(folder))
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_config(config).float().train()

        def step(run, optimizer, tokens):
            run.forward_backward([{"input_ids": tokens, "labels": tokens}])
            optimizer.step()
            optimizer.zero_grad()

        def program(_rank):
            own = copy.deepcopy(model)
            run = planc.apply(own, plan, overrides=list(settings), device_type="cpu")
            optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4, foreach=True)
            generator = torch.Generator().manual_seed(run.data_rank)
            shape = ROWS // run.data_size, TOKENS
            tokens = torch.randint(config.vocab_size, shape, generator=generator)
            with RankRandom():
                step(run, optimizer, tokens)
                mode = counting()
                states = (v for s in optimizer.state.values() for v in s.values())
                there = (*own.parameters(), *own.buffers(), *states)
                mode.add(t.to_local() if isinstance(t, DTensor) else t for t in there)
                with mode:
                    step(run, optimizer, tokens)
            stages = "pp" in run.mesh.mesh_dim_names
            place = run.mesh.get_local_rank("pp") if stages else 0
            places[place] = min(places.get(place, mode.peak), mode.peak)

        failure = run_ranks(RANKS, program, seconds=900)
        assert failure is None, failure
    return [places[place] for place in sorted(places)]


def errors(peaks):
    """(name, MiB measured, MiB estimated, relative error) of each place of the pipeline."""
    for name, places in peaks.items():
        step = estimated(name)
        for rank, (size, memory) in enumerate(zip(places, step.ranks, strict=True)):
            stage = f", stage {rank}" if len(places) > 1 else ""
            yield name + stage, size / 2**20, memory.peak / 2**20, memory.peak / size - 1


def judge():
    print(f"\n## cpu_peaks.json: {RANKS} ranks as threads, the storages of their tensors\n")
    print("| run | MiB measured | counted | error | estimated | error |\n" + "| --- " * 6 + "|")
    peaks = json.loads(PEAKS.read_text())
    found, run = list(errors(peaks)), [n / 2**20 for name in peaks for n in counted(name)]
    for (name, size, expected, error), own in zip(found, run, strict=True):
        own_error = f"{own:.1f} | {own / size - 1:+.1%}"
        print(f"| {name} | {size:.1f} | {own_error} | {expected:.1f} | {error:+.1%} |")
    sizes = sorted(abs(error) for *_, error in found)
    print(f"\n- memory error median {median(sizes):.1%}, worst {sizes[-1]:.1%}")


def main():
    wanted = [name for name in RUNS if not sys.argv[1:] or sys.argv[1] in name]
    known = json.loads(PEAKS.read_text()) if PEAKS.exists() else {}
    for name in wanted:
        known[name] = measure(name)
        print(name, known[name], file=sys.stderr, flush=True)
        lines = ",\n".join(f'  "{n}": {json.dumps(known[n])}' for n in RUNS if n in known)
        PEAKS.write_text("{\n" + lines + "\n}\n")
    judge()


if __name__ == "__main__":
    main()
