"""The peak of a step's memory on four real gloo processes, beside the estimate of the same plan.

    python tests/tools/estimate/gloo_peaks.py [--again] [WORD...]

measures the combinations whose name has every word and that are not in `data/gloo_peaks.json` yet,
and writes the bytes of each rank there; then it prints the table of
docs/generated/estimate-tables.md. A peak is that of two steps, of every allocation of torch's CPU
allocator until it is released, in gloo's threads too, which the profiler does not see:
`allocations.c` counts them, and gcc compiles it.

The processes are forked from one that has imported what they need, so that a combination takes
seconds.
"""

import argparse
import ctypes
import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from statistics import median

from gloo_combinations import COMBINATIONS, RANKS
from measured_tables import DATA

PEAKS = DATA / "gloo_peaks.json"


def step(run, optimizer, batches):
    run.forward_backward([{"input_ids": b, "labels": b} for b in batches])
    optimizer.step()
    optimizer.zero_grad()


def train(one, path, plan, settings):
    """(place in the pipeline, bytes held at most in two steps) of this rank."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import planc

    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    counter = counting()
    model = AutoModelForCausalLM.from_config(config).float().train()
    run = planc.apply(model, plan, overrides=settings, device_type="cpu", compare=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    generator = torch.Generator().manual_seed(run.data_rank)
    rows = one.rows // run.data_size // one.batches
    ids = torch.randint(config.vocab_size, (one.batches, rows, one.tokens), generator=generator)
    gc.collect()
    counter.begin()
    for _ in range(2):
        step(run, optimizer, ids)
    place = run.mesh.get_local_rank("pp") if "pp" in run.mesh.mesh_dim_names else 0
    return place, counter.most_held()


def counting():
    """The functions of `allocations.c`, which from now on count."""
    counter = ctypes.CDLL(None)
    counter.most_held.restype = counter.held_now.restype = ctypes.c_long
    code = [x.split() for x in Path("/proc/self/maps").read_text().splitlines() if "libc10.so" in x]
    [(first, last)] = [x[0].split("-") for x in code if "x" in x[1]]
    counter.count_calls_from(*(ctypes.c_ulong(int(at, 16)) for at in (first, last)))
    return counter


def preloaded():
    """Starts this program again where its allocations are not counted."""
    if "allocations" in os.environ.get("LD_PRELOAD", ""):
        return
    library = Path(tempfile.mkdtemp()) / "allocations.so"
    source = Path(__file__).with_name("allocations.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    os.execve(
        sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(library)}
    )


def ranked(rank, one, folder, given):
    """Runs one rank in a forked process, and ends it."""
    code = 1
    try:
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        store = distributed.FileStore(f"{folder}/store", RANKS)
        distributed.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
        found = train(one, *given)
        Path(folder, f"{rank}.found").write_bytes(pickle.dumps(found))
        distributed.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def measure(one):
    """Bytes of each rank by the place in the pipeline, in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        children, given = [], one.written(Path(folder))
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                ranked(rank, one, folder, given)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            return None
        found = [pickle.loads(Path(folder, f"{r}.found").read_bytes()) for r in range(RANKS)]
    places = sorted({place for place, _ in found})
    return [[size for at, size in found if at == place] for place in places]


def errors(peaks):
    """(name, MiB measured, MiB estimated, relative error) of each place of the pipeline; of ranks
    at the same place the median counts.
    """
    for name, places in peaks.items():
        ranks = COMBINATIONS[name].estimated().estimate.ranks
        for rank, (sizes, memory) in enumerate(zip(places, ranks, strict=True)):
            stage = f", stage {rank}" if len(places) > 1 else ""
            size = median(sizes)
            yield name + stage, size / 2**20, memory.peak / 2**20, memory.peak / size - 1


def judge(peaks=None):
    known = peaks or json.loads(PEAKS.read_text())
    found = list(errors(known))
    run = [rank.peak / 2**20 for name in known for rank in COMBINATIONS[name].counted()]
    print(f"\n## gloo_peaks.json: {len(known)} combinations on {RANKS} gloo processes\n")
    print("| run | MiB measured | counted | error | estimated | error |\n" + "| --- " * 6 + "|")
    for (name, size, expected, error), own in zip(found, run, strict=True):
        counted = f"{own:.2f} | {own / size - 1:+.2%}"
        print(f"| {name} | {size:.2f} | {counted} | {expected:.2f} | {error:+.1%} |")
    for what, errors_ in (
        ("one rank, run", [own / size - 1 for (_, size, *_), own in zip(found, run, strict=True)]),
        ("the estimate", [error for *_, error in found]),
    ):
        sizes = sorted(map(abs, errors_))
        print(f"\n- {what}: memory error median {median(sizes):.2%}, worst {sizes[-1]:.2%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="measure also what is known")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    known = json.loads(PEAKS.read_text()) if PEAKS.exists() else {}
    wanted = [n for n in COMBINATIONS if all(w in n for w in options.words)]
    for name in wanted:
        if name in known and not options.again:
            continue
        found = measure(COMBINATIONS[name])
        print(name, found, file=sys.stderr, flush=True)
        if found is None:
            continue
        known[name] = found
        lines = ",\n".join(f'  "{n}": {json.dumps(known[n])}' for n in COMBINATIONS if n in known)
        PEAKS.write_text("{\n" + lines + "\n}\n")
    judge({n: known[n] for n in wanted if n in known})


if __name__ == "__main__":
    preloaded()
    import transformers
    from transformers import AutoModelForCausalLM  # noqa: F401  (before the fork)

    transformers.utils.logging.set_verbosity_error()
    main()
