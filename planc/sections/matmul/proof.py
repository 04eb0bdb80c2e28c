"""Reports the results of a run with fp8 matmuls, at the lines of the matmul section."""

from planc.diagnostics.diagnostic import Label, Severity, Sink
from planc.ir.nodes import Plan
from planc.proof.flow_findings import what_is_wrong
from planc.simulate.outcome import Outcome

TITLE = "with fp8 matmuls"
"""The row of `planc verify` for the largest error."""


def report(outcome: Outcome, plan: Plan, sink: Sink, strict: bool) -> None:
    """Reports fp8 matmuls that differ from those of one process (PL629), or that cannot be compared
    (PL504), after a run that was right in float32.
    """
    lines = dict.fromkeys(op.origin for op in plan.sections["matmul"])
    if outcome.verdict == "unknown":
        sink.report(
            Severity.ERROR if strict else Severity.WARNING,
            "PL504",
            f"layout flow cannot decide whether fp8 matmuls are right: {outcome.reason}",
            *lines,
        )
    if outcome.verdict != "refuted":
        return
    first = outcome.discrepancies[0]
    where = f"`{first.subject or 'the model'}`"
    crash = f": {first.detail}" if first.kind == "crash" else ""
    _wrong(first.error, what_is_wrong(first.kind, where) + crash, plan, sink)


def report_wrong(error: float, plan: Plan | None, sink: Sink) -> str:
    """Reports a relative error that is too large on processes (PL629), and returns the reason of
    the verdict.
    """
    _wrong(error, "the model trains otherwise", plan, sink)
    return "fp8 matmuls differ from those of one process"


def _wrong(error: float, what: str, plan: Plan | None, sink: Sink) -> None:
    """Reports PL629; an error of 0 if nothing could be compared."""
    lines = dict.fromkeys(op.origin for op in plan.sections["matmul"]) if plan else ()
    sink.error(
        "PL629",
        f"with fp8 matmuls, {what}",
        *(Label(span=line, text="fp8 matmuls") for line in lines),
        facts=[
            *([f"one process with the same matmuls: {error:.1e} off"] if error else []),
            "seen on a proxy model, and right without them",
        ],
        help="keep these layers in the parameters' dtype: `override ... : none`",
    )
