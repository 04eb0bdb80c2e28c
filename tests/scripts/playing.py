"""Plays random sequences of what training scripts do, on every kind of plan, against one process.

Each operation shows what it shows in one process, or planc refuses it by the code that
`script_changes.REFUSED` has, and the sequence ends.

    python -W ignore tests/scripts/playing.py --scripts 300 --seed 7 --plans fsdp,cp --processes

Ranks are threads of this process, or four gloo processes. Where they show something else than one
process does, the shortest sequence that still fails is printed.
"""

import argparse
import copy
import random
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from folders import FOLDERS

sys.path.extend(FOLDERS)

import numerics
import script_jobs
from pool import Pool, RankError
from script_changes import Refused

from planc.simulate.thread_ranks import run_ranks

LIMIT = {"bf16": 0.15}
"""One process in bf16 is 0.09 off one in fp32, where a gradient nearly cancels."""
WITHIN = 2e-4
SECONDS = 60
LENGTHS = range(3, 13)
REFUSAL = re.compile(r"Refused: operation (\d+), (PL\d+)")


def on_threads(plan, script, folder):
    """What each rank shows, with ranks as threads; raises what the first one raised."""
    shown, built = {}, numerics.build(script_jobs.PLANS[plan][0])
    made = [copy.deepcopy(built) for _ in range(4)]

    def program(rank):
        shown[rank] = script_jobs.on_rank(plan, script, folder, made[rank])

    failure = run_ranks(4, program, SECONDS)
    if failure is not None and isinstance(failure.error, Refused):
        return [refusal(failure.error)]
    if failure is not None:
        raise failure.error or RuntimeError(failure.message)
    return [shown[rank] for rank in range(4)]


def refusal(refused):
    """What the first stage that refuses an operation has shown."""
    return {**refused.shown, (refused.at, "refused"): refused.code}


class OnProcesses:
    """The same on gloo processes, which start anew after a failure."""

    def __init__(self, pool=None):
        self.pool = pool

    def __call__(self, plan, script, folder):
        self.pool = self.pool or Pool()
        try:
            return self.pool.run("script_jobs.on_rank", plan=plan, script=script, folder=folder)
        except RankError as error:
            self.pool = None
            if (refused := REFUSAL.search(str(error))) and plan.startswith("pp"):
                return [{(int(refused[1]), "refused"): refused[2]}]
            raise


def difference(plan, script, ranks):
    """What is wrong with a script: the first place where a rank shows something else; or ''."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = ranks(plan, script, folder)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}"
    return unlike(plan, script_jobs.by_itself(plan, script[: ends(found)]), found)


def ends(found):
    """The operation that the ranks refuse, where a script ends; None if they refuse none."""
    return min((at for shown in found for at, name in shown if name == "refused"), default=None)


def unlike(plan, right, found):
    """The first value that differs on a rank. A pipeline's ranks have a part of the gradients, and
    rank 0 alone reads what is exported.

    Where ranks refuse an operation, all refuse the same one, or the other stages of a pipeline end
    with it; of a pipeline on processes only this is known.
    """
    if (end := ends(found)) is not None:
        if {(end, "refused")} != {key for shown in found for key in shown if key[1] == "refused"}:
            return "ranks refuse different operations"
        if any((end, "refused") not in shown for shown in found):
            return f"operation {end}: some ranks refuse it alone"
        found = [{k: v for k, v in shown.items() if k[1] != "refused"} for shown in found]
        known = found[0].keys() if plan.startswith("pp") else right.keys()
        right = {key: value for key, value in right.items() if key[0] < end and key in known}
    limit, whole = LIMIT.get(plan, WITHIN), not plan.startswith("pp")
    for key, value in right.items():
        at, name = key
        gradient = name.startswith("gradient of")
        mine = [(rank, shown[key]) for rank, shown in enumerate(found) if key in shown]
        every = not name.startswith("export ") and (whole or not gradient)
        if len(mine) < (len(found) if every else 1):
            return f"operation {at}: {name} is missing"
        least = 1e-3 if gradient else 1e-6
        for rank, one in mine:
            if one.shape != value.shape or (error := numerics.error(one, value, least)) > limit:
                error = error if one.shape == value.shape else f"shape {list(one.shape)}"
                return f"operation {at}: {name} on rank {rank}, error {error:.3g}"
    extra = {key for shown in found for key in shown} - right.keys()
    return f"{min(extra)} is shown by ranks alone" if extra else ""


def shortest(plan, script, ranks):
    """The shortest script that still fails, by leaving out operations, then smaller numbers."""
    size = len(script)
    while size := size // 2:
        at = 0
        while at < len(script):
            shorter = script[:at] + script[at + size :]
            if shorter and difference(plan, shorter, ranks):
                script = shorter
            else:
                at += size
    for at, (name, number) in enumerate(script):
        for smaller in range(min(number, 2)):
            simpler = [*script[:at], (name, smaller), *script[at + 1 :]]
            if difference(plan, simpler, ranks):
                script = simpler
                break
    return script


def drawn(plan, numbers):
    """A random script."""
    every = script_jobs.operations(plan)
    return [(numbers.choice(every), numbers.randrange(6)) for _ in range(numbers.choice(LENGTHS))]


def told(script):
    return " ".join(f"{name}:{number}" for name, number in script)


def read(text):
    """A script as it is printed."""
    pairs = (word.split(":") for word in text.split())
    return [(name, int(number)) for name, number in pairs]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", default=",".join(script_jobs.PLANS))
    parser.add_argument("--processes", action="store_true", help="gloo processes, not threads")
    parser.add_argument("--script", help="one script, as it was printed")
    options = parser.parse_args()
    ranks, plans = OnProcesses() if options.processes else on_threads, options.plans.split(",")
    began, failed = time.monotonic(), 0
    for number in range(options.scripts):
        plan = plans[number % len(plans)]
        script = drawn(plan, random.Random(f"{options.seed} {number}"))
        if options.script:
            script = read(options.script)
        if not (wrong := difference(plan, script, ranks)):
            continue
        failed += 1
        short = script if options.script else shortest(plan, script, ranks)
        print(f"{plan}, {number}: {told(short)}\n    {difference(plan, short, ranks) or wrong}")
        sys.stdout.flush()
    seconds = time.monotonic() - began
    print(f"{options.scripts} scripts, {failed} wrong, {seconds:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
