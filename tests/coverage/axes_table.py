"""The rows of build/coverage/axes as the last section of docs/generated/coverage.md."""

from collections import Counter

PROCESSES = "processes"
"""The column of what real processes trained."""

TITLE = "## Pipelines, context and expert parallelism, and the loss"
HEAD = """
`make axes` writes this part (`tests/coverage/axis_rows.py`). Each column is a plan with one axis
of two ranks (`loss`: a head over two tensor ranks, whose loss is computed in two parts), judged by
`planc check` with all ranks as threads of one process, in float32, on a proxy model of the family:
the loss of each step, every gradient, the clip norm and two steps of AdamW, beside one process. A
number is the largest error. The column `all` has tensor parallelism and every axis that the row was
proved with, on eight ranks, as far as the plan of the family offers them: the one that ships, or
the one that `planc init --set` writes; `all but` names those that its plan does not have.
The last column is that plan and that proxy model on eight gloo processes
(`tests/coverage/axis_processes.py`), in float64 where float32 is nearly right; a family that was
not trained anew keeps the number of the run before.

*Refused* is a plan that a rule of planc, or its own, refuses by name, with the diagnostic in the
cell; *refuted* one whose proxy model comes out wrong or raises, which `planc check` reports too.
No cell: the family has no fused experts, or transformers cannot build it.

| column | proved | refused | refuted | no answer | not run |
|---|---:|---:|---:|---:|---:|"""
COLUMNS = {
    "pp": "`pipeline on pp`, pp 2",
    "cp": "`context on cp`, cp 2",
    "ring": "the same, `attention = ring`",
    "ep": "`expert on ep`, ep 2",
    "loss": "`loss on tp`, tp 2",
    "all": "all together, eight ranks",
    PROCESSES: "the same, eight gloo processes",
}
TABLE = """
| family | pp 2 | cp 2 | ring | ep 2 | loss on tp | all | on processes |
|---|---:|---:|---:|---:|---:|---|---:|"""
WHY = """
### Why

| column | code | what is said | families |
|---|---|---|---|"""


def section(rows, names=()) -> str:
    """The section.

    Args:
        rows: of the families that have been run, in order.
        names: every family, those without a row too.
    """
    lines = [TITLE, HEAD]
    for column, title in COLUMNS.items():
        counts = Counter(kind(of(row, column)) for row in rows)
        counts["not run"] += len({*names} - {row["type"] for row in rows})
        kinds = ("proved", "refused", "refuted", "no answer", "not run")
        lines.append(f"| {title} | {' | '.join(str(counts[k]) for k in kinds)} |")
    lines.append(TABLE)
    for row in rows:
        cells = [cell(of(row, column)) for column in COLUMNS]
        if any(cells):
            lines.append(f"| {row['type']} | {' | '.join(cells)} |")
    lines.append(WHY)
    for column in COLUMNS:
        said: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            found = of(row, column)
            if kind(found) in ("refused", "refuted", "no answer"):
                said.setdefault((found.get("code", ""), reason(found)), []).append(row["type"])
        for (code, why), families in sorted(said.items(), key=lambda pair: -len(pair[1])):
            link = f"[{code}](../diagnostics/{code}.md)" if code else ""
            lines.append(f"| {column} | {link} | {why} | {', '.join(families)} |")
    return "\n".join(lines) + "\n"


def of(row, column):
    """What was found in a column: processes train what the column before has proved."""
    judged = kind(row.get("all")) in ("proved", "not run")
    return row.get(column) if judged or column != PROCESSES else {"verdict": "unbuilt"}


def kind(found) -> str:
    """`none` is a family that has no such thing, or that transformers itself cannot build."""
    if found is None:
        return "not run"
    if found["verdict"] in ("unknown", "raised", "late"):
        return "no answer"
    return "none" if found["verdict"] == "unbuilt" else found["verdict"]


def cell(found) -> str:
    match kind(found):
        case "proved":
            without = f" all but {', '.join(found['without'])}" if found.get("without") else ""
            how = " gather" if found.get("attention") else ""
            return f"{found['worst']:.0e}{how}{without}"
        case "refused":
            return found["code"]
        case "none":
            return ""
        case "refuted":
            return f"**{found['code']}**"
        case other:
            return other


def reason(found) -> str:
    """What was said, without the name of the class."""
    text = (found.get("facts") or [found["reason"]])[0]
    first, _, rest = text.partition(" ")
    text = rest if first.endswith(("LM", "Model", "Generation")) else text
    return " ".join(text.replace("|", "/").split())[:160]
