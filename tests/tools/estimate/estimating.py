"""Holds the estimate against measured and published runs, and prints the tables of the docs.

`python tests/tools/estimate/estimating.py [--playbook FILE.csv]... [--vtrain FILE.csv]`
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median

import gloo_peaks
import measured_peaks
import measured_steps
import published_runs
import published_tables
from measured_tables import DATA, hardware, playbook, stack, vtrain

from planc.tools.estimate.step_time import step_time
from planc.tools.suggest.measurements import CONSTANTS, Timed, calibrate

HEAD = """# The estimate beside measured and published runs

Written by `make estimate`.

- **Slow runs.** 108 of the 593 runs of nanotron's playbook took 2.5 to 66 times as long as a run of
  equal tensor and pipeline sizes on half to twice the nodes. In pipelines they lose 0.52, 1.04,
  1.17 and 1.2 s per microbatch with 2, 4, 8 and 16 stages, whatever the message's size. nanotron
  sends each tensor after two small messages, and its branch `nouamane/bench2` (commit 67c5ebb)
  polls for each of the two every 0.1 s. Nothing in a plan predicts this, so the estimate does not
  model it. It is not known why runs without a pipeline are slow on 64 nodes.
- **Constants.** Five constants of nanotron's stack were read off the playbook's table:
  `matmul_pace`, `tensor_overlap`, `launches_a_collective`, `data_overlap` and `stall_us`. Other
  constants were measured on one H100 or follow from the software's source. No constant was fitted
  to the H200, and `b200-8x` was not measured.
- **torchtitan.** Its memory is what the allocator reserved. Its H100s have 96 GB of slower memory
  and a limit of 500 W, which no profile has.
- **gloo.** `make peaks` trains combinations of a proxy model, a plan and a batch on four processes
  for two steps, and records the peak of torch's CPU allocator.
"""
"""The page's text before the tables."""


def quantile(values, share):
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else float("nan")


def spearman(pairs):
    """The rank correlation of pairs; ties have the mean of their ranks."""

    def ranks(values):
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0.0] * len(values)
        for i in range(len(order)):
            same = [j for j in range(len(order)) if values[order[j]] == values[order[i]]]
            found[order[i]] = sum(same) / len(same)
        return found

    one, two = (ranks(list(side)) for side in zip(*pairs, strict=True))
    middle = (len(pairs) - 1) / 2
    product = sum((a - middle) * (b - middle) for a, b in zip(one, two, strict=True))
    norm = (sum((a - middle) ** 2 for a in one) * sum((b - middle) ** 2 for b in two)) ** 0.5
    return product / norm if norm else 1.0


def near(runs):
    """By the number of each run, those with the same tensor and pipeline ranks and micro-batch on
    half to twice the nodes.
    """
    by = defaultdict(list)
    for run, _ in runs:
        by[run.row["tp"], run.row["pp"], run.row["mbs"]].append(run)
    for i, (run, _) in enumerate(runs):
        nodes, same = int(run.row["nodes"]), by[run.row["tp"], run.row["pp"], run.row["mbs"]]
        yield i, run, [o for o in same if nodes / 2 <= int(o.row["nodes"]) <= 2 * nodes]


def slow(runs):
    """Runs under 0.4 of the throughput of another one with the same tensor and pipeline ranks and
    micro-batch on half to twice the nodes.

    The table has two populations, which `HEAD` explains.
    """
    return {
        i
        for i, run, others in near(runs)
        if run.tokens_per_second < 0.4 * max(o.tokens_per_second for o in others)
    }


def without_slowness(runs, apart):
    """The throughput that a model would give which is right for all runs but the slow ones, and
    takes those for as fast as the best of their neighbors.
    """
    for i, run, others in near(runs):
        yield max(o.tokens_per_second for o in others) if i in apart else run.tokens_per_second


def errors(runs):
    """Relative errors of the time of a step."""
    return [abs(run.tokens_per_second / e.tokens_per_second - 1) for run, e in runs]


def judge_playbook(path):
    profile, software = hardware("h100-efa"), stack("nanotron")
    every = list(playbook(path))
    ran = [run for run in every if run.tokens_per_second is not None]
    runs = [(run, step_time(run.work, profile, software)) for run in ran]
    apart = slow(runs)
    usual = [pair for i, pair in enumerate(runs) if i not in apart]
    print(f"\n## {path.name}: {len(every)} rows, {len(runs)} ran, {len(apart)} slow ones\n")
    print("| rows | time median | time 75 % |\n" + "| --- " * 3 + "|")
    for name, part in {"all that ran": runs, "without the slow ones": usual}.items():
        time = errors(part)
        print(f"| {name} | {median(time):.1%} | {quantile(time, 0.75):.1%} |")
    print()
    print_nodes(runs, usual, [*without_slowness(runs, apart)])
    print("\nBy column, without the slow ones:")
    for key in ("tp", "pp", "zero"):
        print_held_out(key, usual)


def print_nodes(runs, usual, best_known):
    """Per number of nodes; `best_known` are throughputs of `without_slowness`."""
    print(
        "| nodes | rows | time median | Spearman | of a model that is right but for slow ones "
        "| without slow ones | chosen / best |"
    )
    print("| --- " * 7 + "|")
    for nodes in sorted({int(run.row["nodes"]) for run, _ in runs}):
        part, other = ([p for p in s if int(p[0].row["nodes"]) == nodes] for s in (runs, usual))
        ranks = [
            spearman([(run.tokens_per_second, e.tokens_per_second) for run, e in some])
            for some in (part, other)
        ]
        right = [
            (run.tokens_per_second, given)
            for (run, _), given in zip(runs, best_known, strict=True)
            if int(run.row["nodes"]) == nodes
        ]
        chosen, _ = max(part, key=lambda pair: pair[1].tokens_per_second)
        best = max(run.tokens_per_second for run, _ in part)
        print(
            f"| {nodes} | {len(part)} | {median(errors(part)):.1%} | {ranks[0]:.2f} "
            f"| {spearman(right):.2f} | {ranks[1]:.2f} | {chosen.tokens_per_second / best:.0%} |"
        )


def print_held_out(key, runs):
    """Medians by a column: constants that were fitted to some rows would fail on others."""
    print(f"\n| {key} | rows | time median | signed time |\n" + "| --- " * 4 + "|")
    for value in sorted({int(run.row[key]) for run, _ in runs}):
        part = [(run, e) for run, e in runs if int(run.row[key]) == value]
        signed = median(e.tokens_per_second / run.tokens_per_second - 1 for run, e in part)
        print(f"| {value} | {len(part)} | {median(errors(part)):.1%} | {signed:+.1%} |")


def judge_vtrain(path):
    profile, software = hardware("a100-8x"), stack("megatron")
    runs = list(vtrain(path))
    sample = runs[::20]  # a twentieth
    fitted = calibrate(profile, software, [Timed(run.work, run.seconds) for run in sample])
    print(f"\n## {path.name}: {len(runs)} rows\n")
    for name, machine in (("as shipped", profile), (f"calibrated on {len(sample)} rows", fitted)):
        times = [(run.seconds, step_time(run.work, machine, software).seconds) for run in runs]
        found = [abs(e / s - 1) for s, e in times]
        print(
            f"- {name}: time error median {median(found):.1%}, 95 % {quantile(found, 0.95):.1%}, "
            f"Spearman {spearman(times):.3f}"
        )
    pairs = ", ".join(f"{n} {getattr(profile, n):g} -> {getattr(fitted, n):.4g}" for n in CONSTANTS)
    print(f"- constants: {pairs}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--playbook", type=Path, action="append")
    parser.add_argument("--vtrain", type=Path, default=DATA / "vtrain_a100_sample.csv")
    options = parser.parse_args()
    print(HEAD, end="")
    for path in options.playbook or [DATA / "playbook_3.57B.csv"]:
        judge_playbook(path)
    judge_vtrain(options.vtrain)
    for name in ("h100", "h200"):
        measured_steps.judge(name)
    measured_peaks.judge()
    gloo_peaks.judge()
    published_runs.judge()
    published_tables.judge()


if __name__ == "__main__":
    main()
