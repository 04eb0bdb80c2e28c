"""`make bench`: tables of medians and ratios, each part of which is measured in one run.

    python tests/bench/run.py [PARTS] [--repeat 7]

The rows are added to docs/generated/bench.json, from which bench.md is written.

Each ratio is against a reference that is measured beside it, in the same turn: a busy machine
slows both. Commands are measured by their processor time, and a ratio is the median of those of
the turns.
"""

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from planc.files.resources import PLANS

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from bench_page import add_rows  # noqa: E402

REFERENCE = [sys.executable, "-c", "from transformers import AutoModelForCausalLM"]


FIVE = ("dp_replicate=2", "pp=2", "cp=2")
PLAN = PLANS / "llama.plan"


def check(model, ranks, *more):
    plan = ["llama", "--world-size", str(ranks), "--set", "tp=8", "--format", "concise"]
    return [sys.executable, "-m", "planc.cli", "check", str(model), *plan, *more]


def suggest(folder, model, ranks, rows, tokens):
    batch = ["--world-size", str(ranks), "--batch", str(rows), "--seq", str(tokens)]
    output = ["-o", f"{folder}/suggested.plan"]
    return [sys.executable, "-m", "planc.cli", "suggest", model, "--no-run", *batch, *output]


def searches(folder):
    """Seconds of `planc suggest`, by what is searched: the better of two turns."""
    asked = {
        "llama-3.1-70b": ("llama-3.1-70b", 1024, 1024, 8192),
        "deepseek-v3": ("deepseek-v3", 1024, 1024, 4096),
        "16 ranks": ("llama-3.1-8b", 16, 32, 8192),
        "16,384 ranks": ("llama-3.1-8b", 16_384, 16_384, 8192),
    }
    seconds = {}
    for _ in range(2):
        for name, words in asked.items():
            fresh = with_cache(tempfile.mkdtemp(dir=folder))
            for when in ("first", "again"):
                taken = timed(suggest(folder, *words), fresh)
                seconds[name, when] = min(taken, seconds.get((name, when), taken))
    return seconds


def timed(command, environment):
    """The seconds of processor time that a command takes."""
    before = processor_time()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} gave {done.returncode}:\n{done.stdout}{done.stderr}")
    return processor_time() - before


def processor_time():
    """The seconds of processor time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shaped(folder, layers):
    """The 405B model's numbers with another number of layers."""
    config = json.loads((PLANS / "models" / "llama-3.1-405b.json").read_text())
    config["num_hidden_layers"] = layers
    path = folder / f"llama-{layers}.json"
    path.write_text(json.dumps(config))
    return path


COMMANDS = [
    ("check, warm, 405B, 16,384 ranks", "warm", "reference", 0.10),
    ("check, warm, 405B, five axes", "five axes", "reference", 0.12),
    ("check, cold, structure alone", "cold", "reference", 1.3),
    ("check, warm, 65,536 ranks against 8", "65,536 ranks", "8 ranks", 1.2),
    ("check, warm, 1,024 layers against 32", "1,024 layers", "32 layers", 1.1),
]


def with_cache(folder):
    """The environment with a cache in a folder, and with bytecode, as of an installed package."""
    made = {**os.environ, "PLANC_CACHE_DIR": str(folder)}
    made.pop("PYTHONDONTWRITEBYTECODE", None)
    return made


def commands(folder, repeat):
    """Yields the rows of whole processes, the contenders taking turns."""
    warm = with_cache(folder / "warm")
    five = [word for setting in FIVE for word in ("--set", setting)]
    small, large = shaped(folder, 32), shaped(folder, 1024)
    contenders = {
        "reference": lambda: (REFERENCE, warm),
        "warm": lambda: (check("llama-3.1-405b", 16_384), warm),
        "cold": lambda: (
            check("llama-3.1-405b", 16_384, "--level", "structure"),
            with_cache(tempfile.mkdtemp(dir=folder)),
        ),
        "five axes": lambda: (check("llama-3.1-405b", 16_384, *five), warm),
        "fmt": lambda: ([sys.executable, "-m", "planc", "fmt", "--check", str(PLAN)], warm),
        "help": lambda: ([sys.executable, "-m", "planc", "--help"], warm),
        "8 ranks": lambda: (check("llama-3.1-405b", 8), warm),
        "65,536 ranks": lambda: (check("llama-3.1-405b", 65_536), warm),
        "32 layers": lambda: (check(small, 16_384), warm),
        "1,024 layers": lambda: (check(large, 16_384), warm),
    }
    seconds = {name: [] for name in contenders}
    for turn in range(repeat + 1):
        for name, make in contenders.items():
            taken = timed(*make())
            if turn:  # the first turn fills the caches
                seconds[name].append(taken)
    for what, mine, reference, limit in COMMANDS:
        yield what, *middle(zip(seconds[mine], seconds[reference], strict=True)), limit
    yield "planc --help, against 0.10 s", statistics.median(seconds["help"]), 0.10, 1.0
    yield "planc fmt, against 0.10 s", statistics.median(seconds["fmt"]), 0.10, 1.5


def middle(turns):
    """The pair of seconds with the median ratio."""
    ordered = sorted(turns, key=lambda pair: pair[0] / pair[1])
    return ordered[len(ordered) // 2]


SHAPES = sorted(path.stem for path in (PLANS / "models").glob("*.json"))


def first_checks(folder, shapes):
    """Yields the rows of the first check of every shipped shape, with two tensor ranks, each beside
    the import of its library.
    """
    seconds = {}
    for name in shapes:
        values = json.loads((PLANS / "models" / f"{name}.json").read_text())
        kind = values.get("_class_name")
        library = [*REFERENCE[:2], f"from diffusers import {kind}"] if kind else REFERENCE
        fresh = with_cache(tempfile.mkdtemp(dir=folder))
        words = ["check", name, "--world-size", "8", "--set", "tp=2", "--format", "concise"]
        taken = timed([sys.executable, "-m", "planc", *words], fresh)
        seconds[name] = taken, timed(library, fresh)
        print(f"{name}: {taken:.2f} s, {taken / seconds[name][1]:.2f}", file=sys.stderr)
    worst = max(seconds, key=lambda name: seconds[name][0] / seconds[name][1])
    yield f"check, cold, the worst shape: {worst}", *seconds[worst], 2.0
    what = f"check, cold, the median of {len(seconds)} shapes"
    yield what, *middle(seconds.values()), 1.4


def applied(repeat):
    """Median seconds of planc's apply and of the same torch calls by hand, in one process."""
    done = subprocess.run(
        [sys.executable, str(HERE / "applied.py"), str(repeat)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def steps(what, argument):
    """What tests/bench/steps.py measures."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "steps.py"), what, str(argument)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


AXES = {
    "pipeline": "a step in two stages, 4 microbatches, 1f1b",
    "context": "a step with half of each sequence",
    "experts": "a step with half of the experts",
}


def observation_rows(repeat):
    """What observing a script between the passes of two stages takes of a step."""
    found = steps("observation", 3 * repeat)
    what = "observation of a script between the passes of stages, against the step"
    yield what, found["observation"], found["planc"], 0.003


def axis_rows(axis, what, repeat):
    """The fastest step with an axis, by the clock and on a core, beside torch by hand."""
    found = steps(axis, 3 * repeat)
    yield f"{what}, against torch by hand", found["planc"], found["hand"], 1.02
    yield "its seconds on a core", found["planc cpu"], found["hand cpu"], 1.02


MUON = {"muon": "dp_shard 4", "muon tp": "dp_shard 2, tp 2"}
OTHERS = {"dtensors": "torch's on DTensors", "gathered": "ranks that gather every matrix"}


def muon_rows(what, mesh, repeat):
    """The fastest step of Muon by owners, and what a rank sends in it, beside the others."""
    found = steps(what, 3 * repeat)
    for way, name in OTHERS.items():
        row = f"Muon by owners, {mesh}, against {name}"
        yield row, found["owners"], found[way], 1.0
        sent = (found[f"{one} bytes"] / 1e6 for one in ("owners", way))
        yield "MB that a rank sends in it", *sent, 1.0


def state_rows(repeat):
    """The fastest step of Mamba 2 with quarters of rows, whose states are exchanged, and the most
    MB that it allocates, beside one that gathers what states are computed from.
    """
    found = steps("states", repeat)
    what = "a step with states exchanged, against one that gathers"
    yield what, found["planc"], found["gathered"], 1.0
    yield "MB that it allocates", *(found[f"{w} bytes"] / 1e6 for w in ("planc", "gathered")), 1.0


def memory():
    """MiB that a rank holds at most in three steps, each way in a process of its own; exact."""
    ways = ("hand", "planc", "whole", "chunked")
    return {way: steps("memory", way)[way] / 2**20 for way in ways}


WAYS = {
    "slices": "load, each rank reads its slices",
    "rank0": "load, rank 0 reads and sends",
    "accelerate": "accelerate's cpu_ram_efficient_loading",
    "torch": "torch's broadcast_from_rank0",
}


def loaded(repeat):
    """(median seconds, peak of rank 0, largest peak of the others, shard) of each way of loading.

    Four gloo processes, the ways taking turns; peaks are the largest of all turns.
    """
    ways = [w for w in WAYS if w != "accelerate" or importlib.util.find_spec("accelerate")]
    found = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "weights"
        made = f"import loading; loading.make({str(folder)!r})"
        subprocess.run([sys.executable, "-c", made], cwd=HERE, capture_output=True, check=True)
        for turn in range(repeat + 1):
            for way in ways:
                result = spawned(folder, way, str(Path(scratch) / f"{way}-{turn}"))
                if turn:  # the first turn brings the files into the system's cache
                    found[way].append(result)
    sums = {round(sum(r["sum"] for r in turn), 3) for turns in found.values() for turn in turns}
    assert len(sums) == 1, f"the ways give different weights: {sums}"
    return {way: figures(turns) for way, turns in found.items()}


def figures(turns):
    seconds = statistics.median(max(r["seconds"] for r in turn) for turn in turns)
    first = max(turn[0]["peak"] for turn in turns)
    others = max(r["peak"] for turn in turns for r in turn[1:])
    return seconds, first, others, max(r["shard"] for r in turns[0])


def spawned(folder, way, store):
    """What the four ranks of one load say."""
    command = [sys.executable, "-W", "ignore", str(HERE / "loading.py"), str(folder), way]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(r), store], **pipes) for r in range(4)]
    said = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{way} failed:\n{said[0][1]}")
    return json.loads(said[0][0].splitlines()[-1])


def loading_rows(repeat):
    """Loading 239M parameters in fp32 on four ranks: seconds, and the MiB that a rank grows by."""
    found = loaded(repeat)
    for way in ("slices", "rank0"):
        seconds, *peaks, shard = found[way]
        for other in ("accelerate", "torch"):
            if other in found:
                yield f"{WAYS[way]}, against {WAYS[other]}", seconds, found[other][0], 1.0
                grown = max(peaks) / 2**20, max(found[other][1:3]) / 2**20
                yield "MiB that a rank grows by at most", *grown, 1.0
        wanted = {"slices": shard * 1.05, "rank0": shard + 32_000 * 1024 * 4 * 1.1}[way]
        sizes = max(peaks) / 2**20, wanted / 2**20
        yield "MiB that a rank grows by, against its shard (and the largest tensor)", *sizes, 1.0


def publish_rows(repeat):
    """1.2 billion parameters from four training ranks to an engine of four: seconds, and MiB."""
    from publishing import LAYERS, figures  # which imports torch

    measured = figures(LAYERS, min(repeat, 3))
    ours, usual = measured["planc"], measured["usual"]
    what = "publish, against gathering, broadcasting and loading"
    yield f"{what}: seconds", ours[0], usual[0], 0.5
    sizes = (max(way[1:3]) / 2**20 for way in (ours, usual))
    yield f"{what}: MiB that a process grows by", *sizes, 0.3


def planning_rows(_repeat):
    """What rank 0 does for a checkpoint of 300 tensors under tp 8, without optimizer state."""
    found = {}
    for way in ("planc", "torch"):
        command = [sys.executable, "-W", "ignore", str(HERE / "planning.py"), way]
        done = subprocess.run([*command, "256", "300", "0"], capture_output=True, check=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    seconds = (found[way]["seconds"] for way in ("planc", "torch"))
    yield "planning on rank 0 of 256, against torch's planner", *seconds, 1.0
    sent = ((found[way]["received"] + found[way]["sent"]) / 1e3 for way in ("planc", "torch"))
    yield "kB that rank 0 receives and sends", *sent, 1.0


def command_rows(repeat):
    with tempfile.TemporaryDirectory() as folder:
        yield from commands(Path(folder), repeat)


def shape_rows(_repeat):
    with tempfile.TemporaryDirectory() as folder:
        yield from first_checks(Path(folder), SHAPES)


def search_rows(_repeat):
    """`planc suggest` of 1,024 ranks, and of 16,384 beside 16."""
    with tempfile.TemporaryDirectory() as folder:
        searched = searches(Path(folder))
    for name in ("llama-3.1-70b", "deepseek-v3"):
        first = searched[name, "first"]
        yield f"suggest, {name}, 1,024 ranks, first time, against 10 s", first, 10, 1.0
    large, small = searched["16,384 ranks", "again"], searched["16 ranks", "again"]
    yield "suggest, warm, 16,384 ranks against 16", large, small, 4.0


def apply_rows(repeat):
    found = applied(repeat)
    what = "apply, 126 layers, 64 ranks, meta, against torch by hand"
    yield what, found["planc"], found["hand"], 1.05


def step_rows(repeat):
    found, compared = steps("step", 3 * repeat), steps("rows", 3 * repeat)
    what = "the fastest step, 4 processes, against torch by hand"
    yield what, found["planc"], found["hand"], 1.02
    yield "its seconds on a core", found["planc cpu"], found["hand cpu"], 1.02
    yield "rows compared in a step, against the step", compared["rows"], compared["planc"], 0.005
    changes = "comparison with the model of `apply` in a step, against the step"
    yield changes, compared["changes"], compared["planc"], 0.003


def dispatch_rows(repeat):
    """planc also sorts, gathers and weighs the rows, and adds them up."""
    sent = steps("dispatch", 3 * repeat)
    what = "dispatch and back, against torch's all-to-all alone"
    yield what, sent["planc"], sent["hand"], 2.2


def memory_rows(_repeat):
    peak = memory()
    yield (
        "MiB that a rank allocates in three steps, against torch by hand",
        peak["planc"],
        peak["hand"],
        1.02,
    )
    what = "MiB of a loss in 8 chunks, against full logits"
    yield what, peak["chunked"], peak["whole"], 0.25


PARTS = {
    "commands": command_rows,
    "shapes": shape_rows,
    "suggest": search_rows,
    "apply": apply_rows,
    "step": step_rows,
    **{axis: partial(axis_rows, axis, what) for axis, what in AXES.items()},
    **{what: partial(muon_rows, what, mesh) for what, mesh in MUON.items()},
    "observation": observation_rows,
    "states": state_rows,
    "dispatch": dispatch_rows,
    "memory": memory_rows,
    "loading": loading_rows,
    "planning": planning_rows,
    "publish": publish_rows,
}
"""By the name of a part: the function of its rows."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"by default all: {', '.join(PARTS)}")
    parser.add_argument("--repeat", type=int, default=7)
    asked = parser.parse_args()
    if unknown := {*asked.parts} - {*PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    late = 0
    for name in asked.parts or PARTS:
        rows = [*PARTS[name](asked.repeat)]
        add_rows(name, rows)
        shown = Table(title=f"{name}, medians of {asked.repeat}")
        for heading in ("what", "planc", "reference", "ratio", "limit", ""):
            shown.add_column(heading, justify="left" if heading == "what" else "right")
        for what, mine, reference, limit in rows:
            ratio = mine / reference
            late += ratio > limit
            word = "ok" if ratio <= limit else "over"
            numbers = f"{mine:.3f}", f"{reference:.3f}", f"{ratio:.3f}", f"{limit:.3g}"
            shown.add_row(what, *numbers, word)
        Console(width=110).print(shown)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
