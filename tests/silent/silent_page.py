"""docs/generated/silent-errors.md: its table, and what it says of cases."""

from pathlib import Path

import torch
import transformers

from planc.simulate.launcher import LIMITS

PAGE = Path(__file__).parent.parent.parent / "docs" / "generated" / "silent-errors.md"
NOTHING = "**nothing**"
RIGHT = "right,"
"""What the cell of a case begins with that is computed as in a single process."""
COLUMNS = ("case", "reported in", "the mistake", "in", "truth", "found by", "twin")
HEAD = """\
# Silent errors, replayed

Training frameworks have trained the wrong model without an exception, a warning, or a loss that
looked wrong. Each row is one such error that others have reported, replayed under planc beside its
right twin. `make silent` writes this page; [proof](../proof.md) says why a proxy model suffices.

- **in** says what the replayed mistake is in: the plan, an option of it, the runtime (planc's or
  torch's code is patched), or the training script.
- **truth** is a run on four gloo processes against a single process, in float32, with padding,
  packed documents and unevenly ignored labels. It names the first of logits, loss, gradients, their
  norm, and the parameters after two steps of the plan's optimizer, or of AdamW, that is off, with
  its largest relative error. fp8 and mxfp8 matmuls are emulated by torchao, fp8 in float64.
  The plan runs without the safeguards of `planc.apply`, and with the mistake where planc had it. A
  setting that is ignored trains the right model, without what was asked for; so does a script that
  planc has refused. `raises` is a run that ends in an error of torch or of one rank; a reported one
  of a silent kind trained on. That of sizes in fp8 is stopped by torch's own check for a GPU. `goes
  on` is a run that trains where a single process raises.
- **found by** is the first of `planc check`, `planc verify` (for mistakes in the runtime) and the
  run itself (`planc.apply` with the loop of [training.md](../training.md), or `PlancTrainer`) that
  finds it, with its code and the line. That is one of the plan: of the rules for the module that
  shows the mistake first, which is not always the one with the mistake, and never is where the
  mistake is in the runtime. What the run finds is at a line of the script: of the call that brought
  planc the wrong inputs, labels, weights or optimizer, not of the mistake that made them. An error
  without a code is one of torch on all ranks, as in a single process, or one of `PlancTrainer`.
  `right` is a run of `planc.apply` that computes what a single process does, with its largest
  error, so there is nothing to find.
- **twin** is the largest error of the right twin on four processes.
"""


def committed():
    """What finds each case, as the page says."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else ()
    every = filter(None, map(_cells, lines))
    return {cells[0]: "" if cells[5] == NOTHING else cells[5] for cells in every}


def _cells(line):
    """Those of the row of a case; None for another line."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    known = len(cells) == len(COLUMNS) and cells[0] not in (COLUMNS[0], "---")
    return cells if known else None


def rows():
    """The rows of the page by the name of their case."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else ()
    return {cells[0]: line for line in lines if (cells := _cells(line))}


def write(cases, rows, waiting):
    """Writes the page.

    Args:
        cases: all of them.
        rows: those to write, by the name of the case.
        waiting: the kinds that wait.
    """
    lines = [HEAD, total(rows.values())]
    for kind in dict.fromkeys(case.kind for case in cases if case.name in rows):
        lines += ["", f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
        lines += [rows[c.name] for c in cases if c.kind == kind and c.name in rows]
    lines += ["", "## Kinds that wait", ""]
    lines.append("They are not replayed yet, and are not counted.")
    lines += ["", "| kind | reported in | the mistake | is about |", "| --- | --- | --- | --- |"]
    lines += [f"| {w.kind} | {links(w.public)} | {w.how} | {w.needs} |" for w in waiting]
    PAGE.write_text("\n".join(lines) + "\n")


def total(rows):
    versions = f"torch {torch.__version__.partition('+')[0]}"
    return f"{summary(rows)} ({versions}, transformers {transformers.__version__})"


def row(made):
    case, found = made.case, made.found
    cells = [
        case.name,
        links(case.public),
        case.how,
        case.where,
        told(made.truth),
        finding(found),
        ", ".join(made.twin) or told(made.right),
    ]
    return f"| {' | '.join(cells)} |"


def finding(found):
    """What finds a case, its code and its line."""
    if not found.by:
        return NOTHING
    code = f"`{found.code}`" if found.code else ""
    if found.code.startswith("PL"):
        code = f"[{found.code}](../diagnostics/{found.code}.md)"
    where = f"`{found.line}`" if found.line else ""
    if not where and found.by == "apply":
        where = "when it runs"
    shown = "" if found.code else found.text
    return " ".join(filter(None, [found.by, code, "(warning)" * found.warning, where, shown]))


def links(public):
    """Issues and pull requests, as `owner/name#number`."""
    return ", ".join(
        f"[{name.partition('/')[2]}](https://github.com/{name.replace('#', '/issues/')})"
        for name in public
    )


def told(errors):
    """The first kind of error that is more than rounding; the largest of all if none is."""
    if "crash" in errors:
        return "raises"
    if "alone" in errors:
        return f"goes on, one process raises `{errors['alone']}`"
    for kind, limit in LIMITS.items():
        if not errors.get(kind, 0.0) <= limit:
            value = errors[kind]
            return f"{kind} missing" if value == float("inf") else f"{kind} {value:.1g}"
    return f"right, {max(errors.values()):.0e}" if errors else "not run"


def summary(rows):
    """How many cases are found, by what; of the rows of the page."""
    every = list(map(_cells, rows))
    firsts = [cells[5].partition(" ")[0] for cells in every]
    counts = {by: firsts.count(by) for by in ("check", "verify", "apply", RIGHT, NOTHING)}
    wrong = len(every) - counts[RIGHT]
    named = wrong - counts[NOTHING]
    lines = sum("`" in cells[5] for cells in every)
    refuted = sum(cells[6].startswith("PL") for cells in every)
    return (
        f"Of {len(every)} cases {counts[RIGHT]} are computed as in a single process. Of the other "
        f"{wrong}, {named} are named ({named / max(wrong, 1):.1%}): "
        f"{counts['check']} by `planc check`, {counts['verify']} by `planc verify` alone, "
        f"{counts['apply']} when the run starts; {counts[NOTHING]} by nothing. {lines} "
        f"({lines / max(wrong, 1):.1%}) are at a line of the plan or of the script, or a word "
        f"of the command. {refuted} right twins are refuted."
    )
