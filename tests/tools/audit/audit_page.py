"""`make audit`: docs/generated/audit.md, the verdicts on all plans that transformers ships.

Every plan of each type is run, without a search for repairs. Rows are kept in build/audit as they
come, so that a run that was stopped goes on where it was.
"""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import track

from planc.diagnostics.diagnostic import Sink
from planc.model.sources.default_configs import types_with_plans
from planc.tools.audit.audit import KINDS, audit

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "audit"
HEAD = """# The parallel plans of transformers

`planc audit transformers` of version {version}: each plan of every type with a plan for tensor or
expert parallelism and a language model, on two ranks. [The page on audits](../audit.md) says how a
plan is judged. Made by `make audit`.

| plan | proved | wrong | crash |
|---|---:|---:|---:|
{counts}

| type | plan | verdict | what is wrong |
|---|---|---|---|
{rows}
"""


def row(name):
    """The verdicts on the plans of a type."""
    sink = Sink()
    return [verdict.document() for verdict in audit([name], sink, repaired=())]


def main():
    warnings.simplefilter("ignore")
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = []
    for name in track(types_with_plans(), "auditing", console=Console(stderr=True)):
        kept = FOLDER / f"{name}.json"
        if not kept.exists():
            kept.write_text(json.dumps(row(name)))
        found += json.loads(kept.read_text())
    print(page(found), end="")


def page(found):
    """The page of the verdicts."""
    counts = Counter((one["kind"], one["verdict"]) for one in found)
    lines = [
        f"| `{kind}` | "
        + " | ".join(str(counts[kind, v]) for v in ("proved", "wrong", "crash"))
        + " |"
        for kind in KINDS
    ]
    bad = [one for one in found if one["verdict"] != "proved"]
    rows = [
        f"| {one['type']} | `{one['kind']}` | {one['verdict']} | {reason(one)} |" for one in bad
    ]
    version = transformers.__version__
    return HEAD.format(version=version, counts="\n".join(lines), rows="\n".join(rows))


def reason(one):
    """The tensor and its error, or the exception."""
    if one["verdict"] == "wrong":
        error = "infinitely" if one["error"] is None else f"by {one['error']:.2g}"
        return f"{one['tensor']}, off {error}"
    return one["reason"].replace("|", "\\|")[:160]


if __name__ == "__main__":
    sys.exit(main())
