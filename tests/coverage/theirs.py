"""`make coverage`, second part: transformers' own tensor parallelism of every causal-LM family.

The same small models as in run.py, tp = 2 on two gloo processes, spread by transformers itself
(`from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))`), measured in the same way.
Rows are kept in build/coverage/theirs as they come.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from folders import FOLDERS

sys.path.extend(FOLDERS)

from family_rows import LIMIT, ROOT, first, models, types
from pool import Pool, RankError
from rich.progress import track

from planc.diagnostics.diagnostic import Sink

MANY = 12
"""Families for one pair of processes."""


def row(name, pool):
    """What transformers' own mechanism does with a model type.

    Args:
        name: the model type.
        pool: two processes.

    Returns:
        `verdict`: `none` (no plan), `right`, `wrong` (it ran, and numbers are off), `crash`, or
        `unbuilt`; the reason; and what was measured.
    """
    sink = Sink()
    try:
        _, values, small = models(name, sink)
    except Exception as error:
        return {"type": name, "verdict": "unbuilt", "reason": f"{type(error).__name__}: {error}"}
    if small is None:
        return {"type": name, "verdict": "unbuilt", "reason": first(sink)}
    try:
        ranks = pool.run("transformers_tp_jobs.measure", values=values, timeout=180)
    except RankError as error:
        pool.close()
        last = str(error).strip().splitlines()[-1][:200]
        return {"type": name, "verdict": "crash", "stage": "processes", "reason": last}
    verdict, reason = judged(ranks)
    return {"type": name, "verdict": verdict, "reason": reason, **worst(ranks)}


def judged(ranks):
    """A verdict of both ranks' findings, and its reason."""
    if not ranks[0]["plan"]:
        return "none", ""
    failed = next((r for r in ranks if "error" in r), None)
    if failed and failed["stage"] == "one process":
        return "unbuilt", failed["error"]
    if failed:
        return "crash", f"{failed['stage']}: {failed['error']}"
    found = worst(ranks)
    if max(found["logits"], found["loss"], found["gradient"]) < LIMIT:
        return "right", ""
    what = "logits" if not found["logits"] < LIMIT else "gradients"
    return "wrong", f"{what} are off, without a word: {sorted(found['off'])[:6]}"


def worst(ranks):
    """The findings of the rank that is most wrong, with the largest errors of both."""
    found = max(ranks, key=lambda r: r.get("gradient", -1))
    numbers = ("logits", "loss", "gradient", "weights")
    return found | {k: max(r[k] for r in ranks) for k in numbers if all(k in r for r in ranks)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--again", action="store_true", help="also what was done before")
    parser.add_argument("--part", default="0/1", help="of several runs side by side: 0/2, 1/2")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "coverage" / "theirs")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    own, _, many = options.part.partition("/")
    pool, done = Pool(2), 0
    for name in track((options.types or types())[int(own) :: int(many)], "transformers' own"):
        kept = options.folder / f"{name}.json"
        if kept.exists() and not options.again:
            continue
        if not pool.alive or done == MANY:
            pool.close()
            pool, done = Pool(2), 0
        found = row(name, pool)
        done = MANY if found["verdict"] == "crash" else done + 1
        kept.write_text(json.dumps(found, indent=1))
        print(
            json.dumps({k: v for k, v in found.items() if k not in ("plan", "trace")}), flush=True
        )
    pool.close()


if __name__ == "__main__":
    sys.exit(main())
