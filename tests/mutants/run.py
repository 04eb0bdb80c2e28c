"""`make mutants`: what `planc check` says of broken plans, beside what really happens.

Mutants are made of the shipped plans of SUBJECTS, in the ways in which each is used. The truth is a
training run of two steps on four gloo processes against one process: logits, loss, norms, every
gradient and every parameter. Of each family `--most` mutants are drawn, of each kind in turn
(0: all of them). Nothing is left out because it is awkward: what can't be elaborated can't be run,
and is counted by itself. The counts are added to docs/generated/mutants.json, from which mutants.md
is written.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from folders import FOLDERS, ROOT

sys.path.extend(FOLDERS)

from make import in_place, in_turn, of_modules, on_degrees, on_layers
from subjects import SUBJECTS, texts, ways
from tables import add_sample, category, show
from truth import Job, Truth

from planc import compiler
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.ops.document import digest, dumps
from planc.proof.layout_flow import flow

WORLD = 4
CONTRADICTIONS = frozenset({"PL188", "PL351", "PL411", "PL441", "PL451", "PL453"})
"""Errors that ask for one of two lines, whatever they train: what adapters freeze frozen again,
ranks of `cp` without a context section, a unit of ignored parameters, a style for ignored ones, a
train rule without effect, one of two tied parameters frozen."""
AT_RUN_TIME = re.compile(r"PlanError: .*?error\[(PL488|PL544|PL570)\]")
"""What hangs on the batch, or on the loop, such as losses that nothing scales for gradients in
fp16: every rank stops with a diagnostic, which counts as refuted."""
AHEAD = 6
"""Plans that the truth is asked about while checks go on."""


@dataclass
class Run:
    """What one family gave.

    Args:
        name: the family.
        made: how many texts there are.
        counts: how many by (kind, truth, what check said).
        surprises: where the two differ, in words.
    """

    name: str
    made: int = 0
    counts: Counter = field(default_factory=Counter)
    surprises: list = field(default_factory=list)


class Family:
    """The mutants of one family, asked of check and of four processes."""

    def __init__(self, name, folder, truth):
        self.run, self._folder, self._truth = Run(name), Path(folder), truth
        self._open, self._number = {}, 0

    def judge(self, most, seed):
        for way in ways(self.run.name):
            self._way(way, round(most * way.share) if most else sys.maxsize, seed)
        self._absorb(0)

    def _way(self, way, most, seed):
        plan = SUBJECTS[self.run.name]
        files, name = texts(self.run.name), f"{plan}.plan"
        facts = load_values(dict(way.values), self.run.name.partition(",")[0], Sink())
        base, sink = self._compiled(files, name, facts, way)
        assert base.lowered is not None, f"{name} for {self.run.name}: {[d.message for d in sink]}"
        self._ask(base, sink, way, "unchanged", "")
        seen = {base.digest}
        if way.conditions:
            every = [*on_layers(files, name, base.plan)] if way.name == "deep" else []
            every += on_degrees(files, name, base.plan, way.conditions)
        else:
            every = [*in_place(files), *of_modules(files, name, base.plan)]
        self.run.made += len(every)
        left = most
        for mutant in in_turn(every, random.Random(f"{seed} {self.run.name} {way.name}")):
            if not left:
                return
            done, sink = self._compiled(mutant.files, name, facts, way)
            if done.lowered is None:
                self.run.counts[mutant.kind, "not elaborated", "refuted"] += 1
            elif (key := digest(done.lowered)) not in seen:
                seen.add(key)
                left -= 1
                self._ask(done, sink, way, mutant.kind, mutant.what)

    def _compiled(self, files, name, facts, way):
        """(the plan, lowered in spite of what the checks find, or not elaborated; all findings)."""
        for file, text in files.items():
            (self._folder / file).write_text(text)
        sink, checks = Sink(), Sink()
        read = compiler.read(str(self._folder / name), sink)
        done = compiler.compile(
            read, facts, sink, world_size=WORLD, settings=way.settings, checks=checks
        )
        for found in checks:
            sink.add(found)
        return done, sink

    def _ask(self, done, sink, way, kind, what):
        """Asks the processes, and check while they work."""
        self._number += 1
        self._truth.ask(Job(self._number, dict(way.values), dumps(done.lowered)))
        said = verdict(done, sink)
        codes = sorted({d.code for d in sink if d.severity == "error"})
        if codes and CONTRADICTIONS.issuperset(codes):
            said = "contradictory"
        self._open[self._number] = (kind, f"{way.name}, {what}", said, codes)
        self._absorb(AHEAD)

    def _absorb(self, most):
        for number, real, detail in self._truth.answers(most):
            kind, what, said, codes = self._open.pop(number)
            if real == "crash" and (told := AT_RUN_TIME.search(detail)):
                said, codes = "refuted", [*codes, told[1]]
            self.run.counts[kind, real, said] += 1
            if category(real, said) in ("silent", "alarm", "unsure"):
                self.run.surprises.append(
                    f"{self.run.name}, {what}: {real} ({detail}), {said} {' '.join(codes)}"
                )


def verdict(done, sink):
    """`refuted`, `unknown` or `passed`, as `planc check` would say."""
    if sink.has_errors:
        return "refuted"
    found = flow(done, sink)
    if sink.has_errors:
        return "refuted"
    return "unknown" if found.verdict == "unknown" else "passed"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--families", type=names, default=list(SUBJECTS), help="such as llama,wan,llama:stages"
    )
    parser.add_argument("--most", type=int, default=56, help="mutants of each family; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="other numbers draw other mutants")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    with Truth() as truth, tempfile.TemporaryDirectory() as folder:
        for name in options.families:
            began = time.monotonic()
            family = Family(name, folder, truth)
            family.judge(options.most, options.seed)
            run, seconds = family.run, round(time.monotonic() - began)
            counts = [[*key, count] for key, count in sorted(run.counts.items())]
            found = {"family": name, "seconds": seconds, "made": run.made, "counts": counts}
            found |= {"most": options.most, "seed": options.seed, "surprises": run.surprises}
            (options.folder / f"{name}.json").write_text(json.dumps(found, indent=1))
            print(f"{name}: {run.counts.total()} of {run.made} texts, {seconds} s", flush=True)
            print(*run.surprises, sep="\n", flush=True)
    judged = [json.loads((options.folder / f"{n}.json").read_text()) for n in options.families]
    add_sample(judged, options.most, options.seed)
    return show(judged)


def names(text):
    found = [name.replace(":", ", ") for name in text.split(",") if name]
    if unknown := [name for name in found if name not in SUBJECTS]:
        raise argparse.ArgumentTypeError(f"no such family: {', '.join(unknown)}")
    return found


if __name__ == "__main__":
    sys.exit(main())
