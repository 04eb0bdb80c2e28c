"""The rows of build/coverage as docs/coverage.md."""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent.parent


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "coverage")
    rows = [json.loads(p.read_text()) for p in sorted(parser.parse_args().folder.glob("*.json"))]
    built = [r for r in rows if not r["reason"].startswith(("can't be built", "no such"))]
    proved = [r for r in built if r["verdict"] == "proved"]
    half = [r for r in proved if r["share"] > 0.5]
    sequence = [r for r in proved if "errorssp" in r]
    wrong = [r for r in rows if r["reason"].startswith("wrong")]
    silent = [r for r in wrong if "proved" in (r.get("flow"), r.get("flowsp"))]
    numbers = {
        "rows": rows,
        "built": built,
        "proved": proved,
        "half": half,
        "sequence": sequence,
        "wrong": wrong,
        "silent": silent,
    }
    versions = {"torch": torch.__version__.partition("+")[0], "tf": transformers.__version__}
    print(HEAD.format(**{k: len(v) for k, v in numbers.items()}, **versions), end="\n\n")
    print(
        "| family | plan | split | layout flow | logits | gradients | with sequence parallelism |"
    )
    print("|---|---|---:|---|---:|---:|---:|")
    for r in proved:
        print(line(r))
    print("\n## Not proved\n\n| family | why |\n|---|---|")
    for r in rows:
        if r["verdict"] != "proved":
            print(f"| {r['type']} | {r['reason'].replace('|', '/')[:220]} |")


HEAD = """# Every causal-LM family of transformers

`make coverage` wrote this page: for each causal-LM model type of transformers {tf}, a plan (one
that planc ships, else what [`planc init`](init.md) writes for the family's default
configuration), `planc check` of it at the default sizes, and a run of a small model of the family
on four gloo processes (torch {torch}, tp = 2, dp_shard = 2, checkpointing, float32) beside one
process: logits, loss, every gradient (limit 1e-4, relative), and parameters after two steps of
AdamW. Where the plan offers sequence parallelism, once more with it. Configurations that a family
leaves incomplete by default are filled in (`DEFAULTS` and `OWN` in `tests/coverage/run.py`).

Of {rows} types, {built} can be built; **{proved} are proved**, {half} of them with more than half
of their blocks' parameters split over the tensor axis, {sequence} with sequence parallelism too.
Wrong: {wrong}, of which layout flow had called {silent} proved.

`split` is the part of the blocks' parameters that a rank does not hold whole. Errors are the
largest of all ranks."""


def line(r):
    one, two = r["errors"], r.get("errorssp")
    cells = [
        r["type"],
        r["source"],
        f"{r['share']:.0%}",
        r["flow"],
        f"{one['logits']:.0e}",
        f"{one['gradient']:.0e}",
        f"{max(two['logits'], two['gradient']):.0e}" if two else "",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
