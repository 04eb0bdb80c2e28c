"""docs/silent-errors.md: its table, and what it says of cases."""

from pathlib import Path

import torch
import transformers

from planc.trial.launcher import LIMITS

PAGE = Path(__file__).parent.parent.parent / "docs" / "silent-errors.md"
NOTHING = "**nothing**"
COLUMNS = ("case", "reported in", "the mistake", "in", "truth", "found by", "twin")
HEAD = """\
# Silent errors, replayed

Training frameworks have trained the wrong model without an exception, a warning, or a loss that
looked wrong. Each row is one such error that others have reported, replayed under planc beside its
right twin. `make silent` writes this page; [the argument](proof.md) says why a small model decides.

- **in** says what the replayed mistake is in: the plan, an option of it, the runtime (planc's or
  torch's code is patched), or the training script.
- **truth** is a run on four gloo processes against a single process, in float32, with padding,
  packed documents and unevenly ignored labels. It names the first of logits, loss, gradients, their
  norm, and the parameters after two steps of the plan's optimizer, or of AdamW, that is off, with
  its largest relative error. Products in 8 bits are emulated by torchao, those in fp8 in float64.
  A setting that is ignored trains the right model, without what was asked for. `raises` is a run
  that these versions of torch and transformers stop, where the reported one trained on; that of
  sizes in fp8 is stopped by torch's own check for a GPU.
- **found by** is the first of `planc check`, `planc verify` (for mistakes in the runtime) and the
  run itself (`planc.apply` with the loop of [training.md](training.md)) that finds it, with its
  code and the line. That is one of the plan: of the rules for the module that shows the mistake
  first, which is not always the one with the mistake, and never is where the mistake is in the
  runtime. What the run finds is at a line of the script: of the call that brought planc the wrong
  inputs, labels, weights or optimizer, not of the mistake that made them.
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


def write(every, waiting):
    """Writes the page of all replays, with the kinds that wait."""
    lines = [HEAD, total(map(row, every))]
    for kind in dict.fromkeys(made.case.kind for made in every):
        lines += ["", f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
        lines += [row(made) for made in every if made.case.kind == kind]
    lines += ["", "## Kinds that wait", ""]
    lines.append("They are not replayed yet, and are not counted.")
    lines += ["", "| kind | reported in | the mistake | is about |", "| --- | --- | --- | --- |"]
    lines += [f"| {w.kind} | {links(w.public)} | {w.how} | {w.needs} |" for w in waiting]
    PAGE.write_text("\n".join(lines) + "\n")


def put(rows):
    """Puts the rows of some cases on the page, in the place of those that it has, and the totals
    of all.
    """
    new = {_cells(text)[0]: text for text in rows}
    text = PAGE.read_text().partition("\nOf ")[2].partition("\n")[2]
    lines = [new.get((_cells(line) or [""])[0], line) for line in text.splitlines()]
    PAGE.write_text("\n".join([HEAD, total(filter(_cells, lines)), *lines]) + "\n")


def total(rows):
    versions = f"torch {torch.__version__.partition('+')[0]}"
    return f"{summary(rows)} ({versions}, transformers {transformers.__version__})"


def row(made):
    case, found = made.case, made.found
    by = NOTHING
    if found.by:
        code = f"[{found.code}](diagnostics/{found.code}.md)"
        where = f"`{found.line}`" if found.line else "when it runs" * (found.by == "apply")
        by = " ".join(filter(None, [found.by, code, "(warning)" * found.warning, where]))
    cells = [
        case.name,
        links(case.public),
        case.how,
        case.where,
        told(made.truth),
        by,
        ", ".join(made.twin) or told(made.right),
    ]
    return f"| {' | '.join(cells)} |"


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
    for kind, limit in LIMITS.items():
        if not errors.get(kind, 0.0) <= limit:
            value = errors[kind]
            return f"{kind} missing" if value == float("inf") else f"{kind} {value:.1g}"
    return f"right, {max(errors.values()):.0e}" if errors else "not run"


def summary(rows):
    """How many cases are found, by what; of the rows of the page."""
    every = list(map(_cells, rows))
    firsts = [cells[5].partition(" ")[0] for cells in every]
    counts = {by: firsts.count(by) for by in ("check", "verify", "apply", NOTHING)}
    named = len(every) - counts[NOTHING]
    lines = sum("`" in cells[5] for cells in every)
    refuted = sum(cells[6].startswith("PL") for cells in every)
    return (
        f"Of {len(every)} cases {named} are named ({named / max(len(every), 1):.1%}): "
        f"{counts['check']} by `planc check`, {counts['verify']} by `planc verify` alone, "
        f"{counts['apply']} when the run starts; {counts[NOTHING]} by nothing. {lines} "
        f"({lines / max(len(every), 1):.1%}) are at a line of the plan or of the script, or a word "
        f"of the command. {refuted} right twins are refuted."
    )
