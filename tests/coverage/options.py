"""`make options`: every setting of every shipped plan, with each of its values, as `planc check`
judges it on a small world, with one data rank and with two.

Rows are stored in build/coverage/options, one file a model, so a run that was stopped goes on where
it was. A refusal is an error of the rules, with a code. The exit code is 1 if an option is refuted,
or cannot be decided.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from folders import FOLDERS, ROOT

sys.path.extend(FOLDERS)

from axis_rows import judged, limited, settled
from rich.progress import track

from planc.diagnostics.diagnostic import Sink
from planc.elaborate.settings import SETTINGS
from planc.files.resources import PLANS
from planc.ir.mesh_axes import axes_of
from planc.model.load import load
from planc.syntax import ast, plan_files

STAGES = "pp=2 microbatches=4"
WAYS = {
    "tp": ["tp=2"],
    "pp": ["pp=2 microbatches=2"],
    "cp": ["cp=2"],
    "ep": ["ep=2"],
    "etp": ["tp=2 ep=2 etp=2"],
    "dp_replicate": ["dp_replicate=2"],
    "sequence": ["tp=2 sequence=true", "tp=2 sequence=false"],
    "images": ["tp=2 images=rows", "cp=2 images=rows"],
    "recompute": ["tp=2 recompute=false"],
    "loss_chunks": ["loss_chunks=2", "tp=2 loss_chunks=2"],
    "microbatches": [STAGES],
    "schedule": [
        f"{STAGES} schedule={word}"
        for word in ("gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v")
    ],
    "stages": [f"{STAGES} stages={word}" for word in ("work", "balanced")],
    "stages_rows": [f"{STAGES} stages=balanced stages_rows=2"],
    "stages_seq": [f"{STAGES} stages=balanced stages_seq=1024"],
    "param_dtype": ["tp=2 param_dtype=fp32"],
    "reduce_dtype": ["tp=2 reduce_dtype=bf16"],
}
"""The settings with which each option is tried; values that are not here are defaults."""

SECONDS = 900
"""The time limit of an option on one world."""

WRONG = ("refuted", "unknown", "raised", "late")


def models() -> dict[str, str]:
    """A shipped model for each family of each plan, and the name of the plan."""
    found = {}
    for path in sorted((PLANS / "models").glob("*.json")):
        values = json.loads(path.read_text())
        family = values.get("model_type") or values.get("_class_name")
        sink = Sink()
        facts = load(path.stem, sink)
        place = facts and plan_files.plan_of_family(*facts.names, user_folders=False)
        if place:
            found.setdefault((place.path.stem, family), path.stem)
    return {model: plan for (plan, _), model in found.items()}


def options_of(files: tuple[ast.File, ...]) -> list[str]:
    """The settings that a plan or one of its bases uses, as names or as axes of its mesh."""
    nodes = [node for file in files for node in ast.walk(file)]
    words = {node.path for node in nodes if isinstance(node, ast.Name)}
    meshes = [n for n in nodes if isinstance(n, ast.Section) and n.name == "mesh"]
    words |= {item.name for section in meshes for item in section.items}
    return [word for word in SETTINGS if word in words]


def columns_of(files: tuple[ast.File, ...]) -> list[str]:
    """Each way of each option, with the number of data ranks: `tp=2 images=rows | 1`."""
    ways = dict.fromkeys(way for word in options_of(files) for way in WAYS[word])
    return [f"{way} | {data}" for way in ways for data in (1, 2)]


def ranks_of(way: str, data: int) -> int:
    """The number of ranks: of all axes, times the data ranks; `ep` is divided from these."""
    sizes = dict(setting.split("=") for setting in way.split())
    own = {axis: int(size) for axis, size in sizes.items() if axes_of(axis, ("pp", "tp", "cp"))}
    copies = int(sizes.get("dp_replicate", 1))
    experts = int(sizes.get("ep", 1)) if "tp" not in sizes or "etp" in sizes else 1
    ranks = copies * experts * data
    for size in own.values():
        ranks *= size
    return ranks


def worker(send, columns: list[str], model: str, plan: str) -> None:
    """Sends the verdict of each column."""
    sink = Sink()
    facts, files = load(model, sink), plan_files.read(plan, sink)
    case = argparse.Namespace(facts=facts)
    for column in columns:
        way, _, data = column.partition(" | ")
        try:
            found = judged(case, files, ranks_of(way, int(data)), way.split())
        except Exception as error:
            found = {"verdict": "raised", "reason": f"{type(error).__name__}: {error}"[:300]}
        send.send((column, found))


def rows(wanted: set[str], again: set[str], ways: str, folder: Path) -> Iterator[tuple[str, dict]]:
    """Judges what no row has yet; yields each model with its row."""
    for model, plan in track(models().items(), "models"):
        if wanted and not wanted & {model, plan}:
            continue
        kept = folder / f"{model}.json"
        row = json.loads(kept.read_text()) if kept.exists() else {}
        every = columns_of(plan_files.read(plan, Sink()))
        columns = [c for c in every if ways in c and not settled(row.get(c), again)]
        for column, found in limited(worker, columns, dict.fromkeys(columns, SECONDS), model, plan):
            row[column] = found
            kept.write_text(json.dumps(row, indent=1))
            print(model, column, json.dumps(found), flush=True)
        yield f"{model} {plan}", {c: row[c] for c in every if c in row and ways in c}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", default="", help="some plans or models: internvl,qwen3-8b")
    parser.add_argument("--ways", default="", help="a part of the settings: images=rows")
    parser.add_argument("--again", default="", help="verdicts that are judged anew: refuted,late")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "coverage" / "options")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    wanted, again = ({*text.split(",")} - {""} for text in (options.plans, options.again))
    counts, wrong = Counter(), []
    for name, row in rows(wanted, again, options.ways, options.folder):
        counts.update(found["verdict"] for found in row.values())
        wrong += [f"{name}: {c}: {f}" for c, f in row.items() if f["verdict"] in WRONG]
    print(*wrong, sep="\n")
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
