"""`make axes`, the last column: the plans of the column `all`, trained on eight gloo processes.

What `planc check` proves with threads as ranks is run as users run it: for each family whose
column `all` is proved, the same plan and the same small model, and beside one process the logits or
the loss, every gradient, the clip norm, and the parameters after two steps of AdamW.
Rows are kept in build/coverage/axes, so a run that was stopped goes on where it was.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

import family_rows
from axes_table import PROCESSES
from axis_rows import RANKS, Case, case_of, plan_together, proved_axes, settled
from pool import Pool, RankError
from rich.progress import track

from planc import compiler
from planc.diagnostics.diagnostic import Sink
from planc.ir.stand_in import Unrepresented
from planc.ops.document import dumps
from planc.proof.small_case import small_case
from planc.proof.small_mesh import small_sizes, with_experts
from planc.simulate.numerics import NEARLY
from planc.simulate.outcome import LIMIT, PARAMETER_LIMIT
from planc.simulate.trial_part import trial_part

SECONDS = 300
KINDS = ("logits", "loss", "gradient", "norm")


def trained(case: Case, row: dict, plans: dict[str, str], folder: Path, pool: Pool) -> dict:
    """What eight processes find of the plan that the column `all` proved."""
    plan, sink = plan_together(case, plans, proved_axes(row), folder), Sink()
    asked = plan.settings
    if len(plan.ways) > 1:
        asked = [*asked, plan.ways[0 if row["all"]["sequence"] else 1][0]]
    done = compiler.compile(plan.files, case.facts, sink, world_size=RANKS, settings=asked)
    if done.lowered is None:
        return {"verdict": "refused", "reason": family_rows.first(sink)}
    mesh = done.plan.mesh
    small = small_case(done, with_experts(small_sizes(mesh.axes, RANKS), mesh))
    if isinstance(small, Unrepresented):
        return {"verdict": "unknown", "reason": small.reason}
    given = {
        "values": small.model.values,
        "document": dumps(trial_part(small.compiled.lowered)),
        "timeout": SECONDS,
    }
    for wide in (False, True):  # as of simulated ranks: what is nearly right, in float64
        try:
            results = pool.run("coverage_jobs.prove", **given, wide=wide)
        except RankError as error:
            if wide:
                break
            return {"verdict": "raised", "reason": str(error).strip().splitlines()[-1][:300]}
        worst = {kind: max(r[kind] for r in results) for kind in (*KINDS, "parameters")}
        most = max(worst[kind] for kind in KINDS)
        right = most < LIMIT and worst["parameters"] < PARAMETER_LIMIT
        if right or not max(worst.values()) < NEARLY:
            break
    said = {} if right else {"code": "PL520", "reason": f"errors: {worst}"}
    return {
        "verdict": "proved" if right else "refuted",
        **said,
        "worst": max(worst[kind] for kind in KINDS),
        "errors": worst,
        "gradient": results[0]["worst"],
        "mesh": {axis.name: axis.size for axis in small.compiled.lowered.axes},
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", default="", help="some types: mixtral,rwkv")
    parser.add_argument(
        "--again", default="", help="verdicts that are measured anew: refuted,raised"
    )
    parser.add_argument(
        "--folder", type=Path, default=family_rows.ROOT / "build" / "coverage" / "axes"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    plans, pool, again = family_rows.shipped(), Pool(RANKS), set(options.again.split(","))
    for name in track(
        options.families.split(",") if options.families else family_rows.types(), "families"
    ):
        kept = options.folder / f"{name}.json"
        row = json.loads(kept.read_text()) if kept.exists() else {}
        if row.get("all", {}).get("verdict") != "proved" or settled(row.get(PROCESSES), again):
            continue
        if not pool.alive:
            pool = Pool(RANKS)
        case = case_of(name)
        assert isinstance(case, Case), case
        row[PROCESSES] = trained(case, row, plans, options.folder, pool)
        kept.write_text(json.dumps(row, indent=1))
        print(name, json.dumps(row[PROCESSES]), flush=True)
    pool.close()


if __name__ == "__main__":
    sys.exit(main())
