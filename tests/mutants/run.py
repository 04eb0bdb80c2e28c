"""`make mutants`: what `planc check` says of broken plans, beside what really happens.

Mutants are made from each shipped plan with tensor parallelism, with and without sequence
parallelism. The truth is a run on four gloo processes (tp 2, dp_shard 2) against the single
process: logits, loss and every gradient. Nothing is left out because it is awkward: what can't be
elaborated can't be run, and is counted by itself.
"""

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))
sys.path.insert(0, str(Path(__file__).parent))

import numerics
from make import mutants
from pool import Pool, RankError
from rich.console import Console
from rich.progress import track
from rich.table import Table

from planc import compiler
from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.model.load import load_values
from planc.ops.document import digest, dumps
from planc.proof.layout_flow import flow
from planc.resources import PLANS

FAMILIES = {
    "llama": "llama",
    "llama-tied": "llama",
    "qwen2": "llama",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "mixtral": "mixtral",
}
SETTINGS = ["tp=2", "param_dtype=fp32"]
LIMIT = 1e-4


def texts(plan):
    """(what was done, the files of the mutant by name)."""
    files = {f"{plan}.plan": (PLANS / f"{plan}.plan").read_text()}
    if 'extend "llama.plan"' in files[f"{plan}.plan"]:
        files["llama.plan"] = (PLANS / "llama.plan").read_text()
    for name, text in files.items():
        for what, mutant in mutants(text):
            yield f"{name} {what}", {**files, name: mutant}


@dataclass
class Case:
    """A plan file for a model, and what to set."""

    model: str
    facts: Facts
    path: Path
    settings: list[str]


def compiled(case, world=4):
    """(the plan, lowered in spite of what the checks find, or not elaborated; all findings)."""
    sink, checks = Sink(), Sink()
    files = compiler.read(str(case.path), sink)
    done = compiler.compile(
        files, case.facts, sink, world_size=world, settings=case.settings, checks=checks
    )
    for found in checks:
        sink.add(found)
    return done, sink


def verdict(done, sink):
    """`refuted`, `unknown` or `passed`, as `planc check` would say."""
    if sink.failed:
        return "refuted"
    found = flow(done, sink)
    if sink.failed:
        return "refuted"
    return "unknown" if found.verdict == "unknown" else "passed"


class Truth:
    """Runs lowered plans on four processes."""

    def __init__(self):
        self.pool = Pool()

    def of(self, model, lowered):
        if not self.pool.alive:
            self.pool = Pool()
        try:
            results = self.pool.run(
                "numerics.lowered", model=model, document=dumps(lowered), timeout=60
            )
        except RankError:
            return "crash"
        worst = max(max(r["logits"], r["loss"], r["gradient"]) for r in results)
        return "right" if worst < LIMIT else "wrong"


def family(case, plan, truth, counts, surprises):
    """All mutants of one family's plan under one setting."""
    base = Case(case.model, case.facts, PLANS / f"{plan}.plan", case.settings)
    seen = {compiled(base)[0].digest}
    for what, files in track(list(texts(plan)), f"{case.model} {case.settings[-1]}"):
        for name, text in files.items():
            (case.path.parent / name).write_text(text)
        done, sink = compiled(case)
        lowered = done.lowered
        if lowered is None:
            counts[case.model, "cannot be elaborated", "refuted"] += 1
            continue
        if digest(lowered) in seen:
            continue
        seen.add(digest(lowered))
        real = truth.of(case.model, lowered)
        said = verdict(done, sink)
        counts[case.model, real, said] += 1
        if (real == "right") == (said == "refuted"):
            codes = sorted({d.code for d in sink if d.severity == "error"})
            surprises.append(f"{case.model} {case.settings[-1]} {what}: {real}, {said} {codes}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--table", type=Path, help="write the table there as Markdown")
    options = parser.parse_args()
    counts, surprises = Counter(), []
    truth = Truth()
    with tempfile.TemporaryDirectory() as folder:
        for model in options.families:
            plan = FAMILIES[model]
            facts = load_values({**numerics.MODELS[model]}, model, Sink())
            for way in ("true", "false"):
                settings = [*SETTINGS, f"sequence_parallel={way}"]
                case = Case(model, facts, Path(folder) / f"{plan}.plan", settings)
                family(case, plan, truth, counts, surprises)
            silent = show(counts, surprises, options)  # the table so far
    truth.pool.close()
    return silent


def show(counts, surprises, options):
    rows = []
    for model in options.families:
        for real in ("cannot be elaborated", "crash", "wrong", "right"):
            said = [counts[model, real, v] for v in ("refuted", "unknown", "passed")]
            rows.append((model, real, *map(str, said)))
    bad = sum(n for (_, real, _), n in counts.items() if real in ("crash", "wrong"))
    caught = sum(n for (_, r, v), n in counts.items() if r in ("crash", "wrong") and v == "refuted")
    silent = sum(n for (_, r, v), n in counts.items() if r in ("crash", "wrong") and v == "passed")
    false = sum(n for (_, r, v), n in counts.items() if r == "right" and v == "refuted")
    head = ("family", "truth on four processes", "refuted", "unknown", "passed")
    table = Table(*head, title="mutants")
    for row in rows:
        table.add_row(*row)
    Console(width=100).print(table)
    summary = f"{caught} of {bad} bad mutants refuted, {silent} passed in silence, "
    summary += f"{false} equivalent ones refuted"
    print("\n".join([*surprises, summary]))
    if options.table:
        lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(r) for r in rows)]
        options.table.write_text("\n".join(f"| {line} |" for line in lines) + f"\n\n{summary}\n")
    return silent


if __name__ == "__main__":
    sys.exit(bool(main()))
