"""What a run with products in 8 bits found, at the lines of the matmul section."""

from planc.diagnostic import Label, Severity, Sink
from planc.plan.ir import Plan
from planc.proof.flow_findings import what_is_wrong
from planc.trial.outcome import Outcome


def report_eight_bits(outcome: Outcome, plan: Plan, sink: Sink, *, strict: bool) -> None:
    """Reports products in 8 bits that are others than one process's (PL629), or that cannot be
    compared (PL504), after a run that was right in float32.
    """
    lines = dict.fromkeys(op.origin for op in plan.matmul)
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
    sink.error(
        "PL629",
        f"with products in 8 bits, {what_is_wrong(first.kind, where)}{crash}",
        *(Label(span=line, text="rounds to 8 bits") for line in lines),
        facts=[
            *(
                [f"one process with the same products: {first.error:.1e} off"]
                if first.error
                else []
            ),
            "seen on a small model in float64, with all ranks simulated, and right without them",
        ],
        help="keep these layers in the parameters' dtype: `override ... : none`",
    )
