"""`make silent`: silent errors that others have reported, replayed as plans and as seeded faults.

Each case is a right plan and the same with one mistake, which is in the plan, in the runtime, or in
the training script. Four gloo processes tell the truth about both: how far they are from a single
process. `planc check` judges both; what it accepts is tried with the trial of `planc verify`, and
with `planc.apply` and the loop of docs/training.md.

docs/generated/silent-errors.md has the table. The run fails, and leaves the page as it is, if a
case is accepted that the page says is found, if a right twin is refuted, and if the truth is not
what the case says.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from folders import FOLDERS

sys.path.extend(FOLDERS)

import numerics
import silent_faults
import silent_page
from pool import Pool, RankError
from silent_axis_cases import AXIS_CASES
from silent_cases import EIGHT_BITS, RIGHT_TRUTH, Case
from silent_eight_bit_cases import EIGHT_BIT_CASES
from silent_fault_cases import FAULT_CASES, WAITING
from silent_mended_cases import MENDED_CASES
from silent_plan_cases import PLAN_CASES
from silent_update_cases import UPDATE_CASES

from planc import compiler
from planc.diagnostics.codes import CODES
from planc.diagnostics.diagnostic import Sink
from planc.ir.stand_in import Unrepresented
from planc.model.load import load_values
from planc.ops.document import dumps
from planc.proof import judge, layout_flow
from planc.proof.small_case import small_case
from planc.proof.small_mesh import small_sizes
from planc.proof.verify_report import report_difference
from planc.simulate.launcher import LIMITS, comparison
from planc.simulate.trial_part import trial_part

CASES = (
    *(*PLAN_CASES, *UPDATE_CASES, *FAULT_CASES, *AXIS_CASES, *MENDED_CASES),
    *EIGHT_BIT_CASES,  # the last ones, which import torchao
)
WORLD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What finds a mistake first.

    Args:
        by: `check`, `verify`, `apply`; `silent_page.RIGHT` where nothing needs to; empty if nothing
            does.
        code: that of the first error, or of the first warning that the twin does not have; the type
            of an error of torch.
        warning: whether it is a warning.
        line: the text of the line of the plan, or of the script; empty for a finding without one.
        text: its message.
    """

    by: str = ""
    code: str = ""
    warning: bool = False
    line: str = ""
    text: str = ""


@dataclass(slots=True, kw_only=True)
class Replay:
    """A case with its results.

    Args:
        found: what finds it.
        twin: the codes of the errors that planc reports of the right twin; of what the run says
            too, where the right twin is a script.
        truth, right: the relative errors of the case and of its twin, by kind, the largest over
            the ranks; `crash` with a message if a rank raised.
    """

    case: Case
    found: Finding = Finding()
    twin: tuple[str, ...] = ()
    truth: dict = field(default_factory=dict)
    right: dict = field(default_factory=dict)


def compiled(case, files, folder, changes):
    """(the compiled plan, its findings) of one version of a case."""
    for name, text in files.items():
        (folder / name).write_text(text)
    facts = load_values({**numerics.values_of(case.model), **changes}, case.model, Sink())
    sink, checks = Sink(), Sink()
    read = compiler.read(str(folder / case.plan), sink)
    done = compiler.compile(
        read, facts, sink, world_size=WORLD, settings=case.settings, checks=checks
    )
    for found in checks:
        sink.add(found)
    return done, sink


def checked(case, files, folder, changes, fault=""):
    """The compiled plan, the findings of `planc check`, and the loss that its verdict is for.

    No verdict is taken from the cache: a fault is not part of its key.
    """
    done, sink = compiled(case, files, folder, changes)
    text = ""
    if not sink.has_errors:
        with (
            silent_faults.installed(fault),
            mock.patch.object(judge.cache, "recall", lambda *_: None),
            mock.patch.object(judge.cache, "keep", lambda *_: None),
        ):
            text = layout_flow.flow(done, sink).text
    return done, sink, "".join(re.findall(r"for a loss that [^;:)]*", text))


def line_of(span):
    """The line of a plan that a finding points to, as it is written there."""
    return " ".join(span.source.line(span.line).split())


def first_finding(by, sink, known=frozenset()):
    """The first error that has a line, else the first; else a warning whose code is not `known`."""
    errors = [d for d in sink if d.severity == "error"]
    warnings = [d for d in sink if d.severity == "warning" and d.code not in known]
    for found in (*sorted(errors, key=lambda d: not d.labels), *warnings):
        line = next((line_of(label.span) for label in found.labels), "")
        warning = found.severity == "warning"
        return Finding(by=by, code=found.code, warning=warning, line=line, text=found.message)
    return Finding()


class Ranks:
    """Four processes, and what they said of lowered plans."""

    def __init__(self):
        self._pool, self._known = Pool(), {}

    def run(self, function, **arguments):
        if not self._pool.alive:
            self._pool = Pool()
        return self._pool.run(f"silent_jobs.{function}", timeout=120, **arguments)

    def truth(self, function, **arguments):
        key = function + json.dumps(arguments, sort_keys=True)
        if key not in self._known:
            try:
                every = self.run(function, **arguments)
                largest = {kind: max(r[kind] for r in every) for kind in LIMITS if kind in every[0]}
                self._known[key] = largest or every[0]
            except RankError as error:
                self._known[key] = {"crash": str(error).strip().splitlines()[-1]}
        return self._known[key]

    def close(self):
        self._pool.close()


def verified(case, done, ranks):
    """What the trial of `planc verify` says, with the fault of a case on its processes."""
    small = small_case(done, small_sizes(done.plan.mesh.axes, WORLD), checks=Sink())
    if isinstance(small, Unrepresented):
        return Finding()
    part = trial_part(small.compiled.lowered)
    arguments = {"config": small.model.values, "document": dumps(part), "limits": LIMITS}
    try:
        every = ranks.run("verified", **arguments, fault=case.fault)
    except RankError as error:
        return Finding(by="verify", code="PL521", text=str(error).strip().splitlines()[-1])
    found, sink = comparison(every, 0.0), Sink()
    if not found.same:
        report_difference(found, small.compiled.plan, part, sink)
    return first_finding("verify", sink)


def applied(case, folder, ranks, *, twin=False):
    """What `planc.apply` and a loop raise, or log as a warning with a code."""
    every = ranks.run("said", **script_terms(case, folder, twin=twin), fault=case.fault)
    said = [found[0] for found in every if found]
    if not said:
        return Finding()
    code, line, text = said[0]
    warns = code in CODES and CODES[code].severities == ("warning",)
    return Finding(by="apply", code=code, warning=warns, line=line, text=text)


def computed(case, folder, right, ranks):
    """That `planc.apply` and a loop compute what a single process does; an empty finding if not."""
    errors = ranks.truth("truth_applied", **script_terms(case, folder), right=right)
    right = "alone" not in errors and not beyond(errors)
    return Finding(by=silent_page.RIGHT, text=f"{max(errors.values()):.0e}") if right else Finding()


def script_terms(case, folder, *, twin=False):
    return {
        "model": case.model,
        "plan": str(folder / case.plan),
        "settings": case.settings,
        "script": case.twin if twin else case.script or "Script",
        "changes": twin_changes(case) if twin else case.changes,
    }


def twin_changes(case):
    return case.changes if case.right_changes is None else case.right_changes


TWINS = {}
"""What is checked of right twins; cases share some."""


def twin_of(case, folder):
    changes = twin_changes(case)
    key = json.dumps([case.model, changes, case.plan, case.right, case.settings])
    if key not in TWINS:
        TWINS[key] = checked(case, case.right, folder, changes)
    return TWINS[key]


def judged(case, folder):
    """(the case with what check says of both, the lowered plans of the twin and of the case)."""
    right, sink, loss = twin_of(case, folder)
    known = {d.code for d in sink if d.severity == "warning"}
    twin = tuple(sorted({d.code for d in sink if d.severity == "error"}))
    wrong, sink, other_loss = checked(case, case.wrong, folder, case.changes, case.fault)
    found = first_finding("check", sink, known)
    if not found.by and other_loss != loss:
        found = Finding(by="check", text=f"in its verdict: {other_loss}")
    return Replay(case=case, found=found, twin=twin), right, wrong


def replay(case, folder, ranks):
    """The truth about a case and its twin, and what planc says of both."""
    made, right, wrong = judged(case, folder)
    if not made.found.by and case.fault:
        made.found = verified(case, wrong, ranks)
    reference = dumps(right.lowered)
    if not made.found.by:
        made.found = applied(case, folder, ranks)
    if not made.found.by and (case.script or case.before):
        made.found = computed(case, folder, reference, ranks)
    if case.script and (false := applied(case, folder, ranks, twin=True).code):
        made.twin += (false,)
    real = compiled(case, case.ignored, folder, case.changes)[0] if case.ignored else wrong
    both = {"model": case.model, "right": reference}
    twin = {"document": reference, "changes": twin_changes(case), **both}
    if case.beside:
        made.right = ranks.truth("truth_beside", **twin)
    else:
        made.right = ranks.truth("truth", script=case.twin, **twin)
    made.truth = ranks.truth(
        "truth_beside" if case.beside else "truth",
        document=dumps(real.lowered),
        changes=case.changes,
        **both,
        **({} if case.beside else faulty(case)),
    )
    return made


def faulty(case):
    """What is wrong in the truth about a case."""
    script = case.script or "Script"
    return {"fault": case.fault or case.before, "script": script, "bare": bool(case.script)}


def problems(made, committed):
    """What makes the run fail, one line each.

    Args:
        made: a replay.
        committed: what the page says finds it, None for a case that is not on it.
    """
    name, found = made.case.name, made.found
    if made.twin:
        yield f"{name}: the right twin is refuted: {', '.join(made.twin)}"
    if made.right and beyond(made.right):
        yield f"{name}: the right twin trains another model: {made.right}"
    if made.truth and (made.case.kind in RIGHT_TRUTH) == bool(beyond(made.truth)):
        yield f"{name}: the truth is not what the case says: {made.truth}"
    if committed and not found.by:
        yield f"{name}: accepted, and {silent_page.PAGE.name} says that {committed} finds it"


def beyond(errors):
    """The kinds of errors that are more than rounding."""
    if "crash" in errors or "alone" in errors:
        return [*errors]
    return [kind for kind, limit in LIMITS.items() if not errors[kind] <= limit]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="parts of the names of cases; all by default")
    parser.add_argument("--write", action="store_true", help="put their rows on the page")
    parser.add_argument("--part", default="1/1", help="the K-th of N parts of these cases")
    torchao = Path(sys.prefix) / "torchao"
    parser.add_argument("--torchao", default=torchao, help="where fp8 matmuls find it")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    picked = [c for c in CASES if not options.names or any(n in c.name for n in options.names)]
    picked = picked[len(picked) * (part - 1) // parts : len(picked) * part // parts]
    committed, failed, every = silent_page.committed(), [], []
    ranks, began = Ranks(), time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for case in picked:
                since = time.monotonic()
                if case.kind == EIGHT_BITS and str(options.torchao) not in sys.path:
                    sys.path.append(str(options.torchao))
                    ranks.close()  # new ones find it too
                # a folder of its own: a plan may extend one that an earlier case wrote
                own = Path(tempfile.mkdtemp(dir=folder))
                made = replay(case, own, ranks)
                every.append(made)
                failed += problems(made, committed.get(case.name))
                seconds = time.monotonic() - since
                print(f"{silent_page.row(made)} {seconds:.1f} s", flush=True)
                print(*(e["crash"] for e in (made.truth, made.right) if "crash" in e), sep="\n")
    finally:
        ranks.close()
    rows = {made.case.name: silent_page.row(made) for made in every}
    print("\n".join([*failed, silent_page.summary(rows.values())]))
    print(f"{time.monotonic() - began:.0f} s")
    every_case = len(picked) == len(CASES)
    if not failed and (options.write or every_case):
        kept = {} if every_case else silent_page.rows()
        silent_page.write(CASES, {**kept, **rows}, WAITING)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
