"""Reports the results of a run with products in 8 bits, at the lines of the matmul section."""

from planc.diagnostics.diagnostic import Label, Severity, Sink
from planc.ir.nodes import Plan
from planc.proof.flow_findings import what_is_wrong
from planc.simulate.outcome import Outcome

TITLE = "with products in 8 bits"
"""The row of `planc verify` for the largest error."""


def report(outcome: Outcome, plan: Plan, sink: Sink, strict: bool) -> None:
    """Reports products in 8 bits that are others than one process's (PL629), or that cannot be
    compared (PL504), after a run that was right in float32.
    """
    lines = dict.fromkeys(op.origin for op in plan.sections["matmul"])
    if outcome.verdict == "unknown":
        sink.report(
            Severity.ERROR if strict else Severity.WARNING,
            "PL504",
            f"layout flow cannot decide whether products in 8 bits are right: {outcome.reason}",
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
    return "products in 8 bits are others than in one process"


def _wrong(error: float, what: str, plan: Plan | None, sink: Sink) -> None:
    """Reports PL629; an error of 0 if nothing could be compared."""
    lines = dict.fromkeys(op.origin for op in plan.sections["matmul"]) if plan else ()
    sink.error(
        "PL629",
        f"with products in 8 bits, {what}",
        *(Label(span=line, text="rounds to 8 bits") for line in lines),
        facts=[
            *([f"one process with the same products: {error:.1e} off"] if error else []),
            "seen on a proxy model, and right without them",
        ],
        help="keep these layers in the parameters' dtype: `override ... : none`",
    )
