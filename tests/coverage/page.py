"""The rows of build/coverage as docs/generated/coverage.md.

The page has two parts, each made of rows of its own: four processes with tensor parallelism, and
the other axes. A part whose rows are not here stays as it is in the page, and so does what
processes trained of a family that they did not train anew.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import torch
import transformers
from axes_table import PROCESSES, TITLE, section
from reasons import KEPT, THEIRS, UNPROVED
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

ROOT = Path(__file__).parent.parent.parent


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "coverage")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "generated" / "coverage.md")
    options = parser.parse_args()
    folder = options.folder
    before, _, after = (
        options.page.read_text().partition(TITLE) if options.page.exists() else ("",) * 3
    )
    rows, axes = read(folder), read(folder / "axes")
    if rows:
        processes(rows, folder)
    else:
        print(before.rstrip())
    if axes:
        kept_processes(axes, after)
        print("\n" + section(axes, FAMILIES), end="")
    elif after:
        print(f"\n{TITLE}{after}", end="")


def kept_processes(axes, after):
    """Gives rows that eight processes have not trained anew the last cell that the page has."""
    cells = re.findall(r"^\| (\S+) \|.*\| (\de-\d\d)[^|]*\|$", after, re.M)
    kept = {name: {"verdict": "proved", "worst": float(worst)} for name, worst in cells}
    for row in axes:
        if row["type"] in kept:
            row.setdefault(PROCESSES, kept[row["type"]])


def processes(rows, folder):
    """The part that four processes measured."""
    theirs = {r["type"]: r for r in read(folder / "theirs")}
    versions = {"torch": torch.__version__.partition("+")[0], "tf": transformers.__version__}
    print(HEAD.format(**numbers(rows), **versions), end="\n\n")
    print(OWN.format(**compared(rows, theirs)), end="\n\n")
    print(COLUMNS)
    for r in rows:
        if r["verdict"] == "proved":
            print(line(r, theirs.get(r["type"], {})))
    print(FAILED)
    for r in rows:
        own = theirs.get(r["type"], {})
        if own.get("verdict") in ("crash", "wrong"):
            print(
                f"| {r['type']} | {failed(own)} | {THEIRS.get(r['type'], own['reason'])} "
                f"| {ours(r)} |"
            )
    print(LITTLE)
    for r in rows:
        if r["verdict"] == "proved" and r["share"] <= 0.5:
            kept = ", ".join(f"`{name}` {part:.0%}" for name, part in r["kept"])
            print(f"| {r['type']} | {r['share']:.0%} | {kept} | {KEPT.get(r['type'], '')} |")
    print("\n## Not proved\n\n| family | why |\n|---|---|")
    for r in rows:
        if r["verdict"] != "proved":
            why = UNPROVED.get(r["type"]) or " ".join(r["reason"].replace("|", "/").split())
            print(f"| {r['type']} | {why[:300]} |")


def read(folder):
    return [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]


def numbers(rows):
    """What is counted of planc's own rows."""
    built = [r for r in rows if not r["reason"].startswith(("can't be built", "no such"))]
    proved = [r for r in built if r["verdict"] == "proved"]
    wrong = [r for r in rows if r["reason"].startswith("wrong")]
    experts = [r for r in proved if "experts" in r]
    inputs = [r.get("inputs", {}) for r in proved]
    found = {
        "rows": rows,
        "built": built,
        "proved": proved,
        "shipped": [r for r in proved if r["source"] == "shipped"],
        "half": [r for r in proved if r["share"] > 0.5],
        "sequence": [r for r in proved if "errorssp" in r],
        "experts": experts,
        "parted": [r for r in experts if r["experts"]["share"] > 0.99],
        "padded": [i for i in inputs if i.get("padding")],
        "uneven": [i for i in inputs if i.get("uneven")],
        "trained": [r for r in proved if r.get("training") == "yes"],
        "seen": [r for r in proved if "training" in r],
        "wrong": wrong,
        "silent": [r for r in wrong if "proved" in (r.get("flow"), r.get("flowsp"))],
    }
    return {k: len(v) for k, v in found.items()}


def compared(rows, theirs):
    """What is counted of transformers' own mechanism, and of ours where that fails."""
    by = {v: [r for r in theirs.values() if r["verdict"] == v] for v in VERDICTS}
    planned = [*by["right"], *by["wrong"], *by["crash"]]
    bad = {r["type"] for r in (*by["wrong"], *by["crash"])}
    good = {r["type"] for r in rows if r["verdict"] == "proved"}
    found = {v: len(by[v]) for v in VERDICTS}
    found |= {"measured": len(planned) + len(by["none"]), "planned": len(planned)}
    found |= {"bad": len(bad), "mended": len(bad & good)}
    found |= {"nothing": sum(not r["split"] for r in by["right"])}
    found |= {"names": ", ".join(r["type"] for r in by["wrong"])}
    return found


VERDICTS = ("right", "wrong", "crash", "none", "unbuilt")

HEAD = """# Every causal-LM family of transformers

`make coverage` generated this page. For each causal-LM model type of transformers
{tf}, it takes a plan (one that ships with planc, otherwise one that [`planc
init`](../init.md) writes for the default configuration of the family), runs `planc
check` on it at the default sizes, and runs a proxy model of the family on four gloo
processes (torch {torch}, tp = 2, dp_shard = 2, checkpointing, float32). The results
are compared with one process: logits, loss, every gradient (limit 1e-4, relative),
and parameters after two steps of AdamW. If the plan offers sequence parallelism, this
is repeated with it. Default configurations that are incomplete are completed
(`planc/model/sources/default_configs.py`).

Of {rows} types, {built} can be built; **{proved} are proved** ({shipped} with a plan
that ships), {half} of them with more than half of their blocks' parameters sharded
over the tensor axis, {sequence} with sequence parallelism too. {experts} are mixtures
of experts; {parted} of those run with every expert split. Wrong: {wrong}, of which
layout flow reported {silent} as proved.

The three columns after that of sequence parallelism say what these runs had, of the
{seen} families that were run since there are such columns; the others say `not run`.
{padded} ran with padding on the left (`attention_mask` with zeros; `none`: the model
takes none), {uneven} with labels that are ignored unevenly over the data ranks
(`means`: its loss takes no number of tokens, so every rank has equally many), and
{trained} in training mode with the dropout of the family's default configuration
(`no dropout`: that has none; `not compared`: it trains, and ranks draw for their shards
what one process cannot draw, [PL670](../diagnostics/PL670.md))."""

OWN = """The last column is transformers' own tensor parallelism, measured in the same way: the
same proxy model is saved and loaded by two processes with
`DistributedConfig(tp_size=2)`, and compared with the same checkpoint in one process;
attention, dropout, batch and limit are those of the other columns
(`tests/coverage/theirs.py`). Of {measured} types, {planned} have a plan of their own:
**{right} train right** ({nothing} of them without sharding any block), {crash} crash,
and **{wrong} are silently wrong** ({names}). planc's plan is right for {mended} of
those {bad}."""

COLUMNS = """The column `plan` links the plan that ships, or says `init`. `split` is the share of
the blocks' parameters that are sharded, `experts` that of the experts alone, each of
which is sharded inside (by the style `experts`, or as linears). Errors are the
largest of all ranks.

| family | plan | split | experts | layout flow | logits | gradients | with sequence parallelism \
| padding | uneven labels | dropout | transformers' own |
|---|---|---:|---:|---|---:|---:|---:|---|---|---|---|"""

FAILED = """
## Where transformers' own plan fails

Each case was analyzed by hand. Users notice a crash; they do not notice wrong numbers.

| family | at tp = 2 | why | planc |
|---|---|---|---|"""

LITTLE = """
## Less than half split

| family | split | replicated | why |
|---|---:|---|---|"""


def line(r, own):
    one, two, experts = r["errors"], r.get("errorssp"), r.get("experts")
    cells = [
        r["type"],
        f"[{r['plan']}](../../plans/{r['plan']}.plan)" if r["source"] == "shipped" else "init",
        f"{r['share']:.0%}",
        f"{experts['share']:.0%}" if experts else "",
        r["flow"],
        f"{one['logits']:.0e}",
        f"{one['gradient']:.0e}",
        f"{max(two['logits'], two['gradient']):.0e}" if two else "",
        *inputs_cells(r),
        theirs_cell(own),
    ]
    return f"| {' | '.join(cells)} |"


def inputs_cells(r):
    """What the runs had: padding, uneven labels, dropout."""
    inputs = r.get("inputs")
    if inputs is None:
        return ["not run", "not run", r.get("training", "not run")]
    return [
        "yes" if inputs["padding"] else "none",
        "yes" if inputs["uneven"] else "means",
        r.get("training", "not run"),
    ]


def theirs_cell(own):
    match own.get("verdict"):
        case "right":
            return f"right, {own['split']:.0%}" if own["split"] else "right, splits no block"
        case "wrong":
            return "**wrong**"
        case "crash":
            return "**crash**"
        case "none":
            return "no plan"
    return ""


def failed(own):
    """What is seen of a failure."""
    if own["verdict"] == "crash":
        return "crash"
    if own["weights"] > 1e-4 and not own["logits"] < 1e-4:
        return f"wrong weights; logits off by {own['logits']:.0%}"
    what = "logits" if not own["logits"] < 1e-4 else "gradient"
    return f"wrong {what}, off by {own[what]:.0%}"


def ours(r):
    if r["verdict"] != "proved":
        return "not proved"
    return f"right: gradients within {r['errors']['gradient']:.0e}, {r['share']:.0%} split"


if __name__ == "__main__":
    sys.exit(main())
