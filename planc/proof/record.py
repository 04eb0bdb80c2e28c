"""Writes down what a check found, for `planc.apply` to find by the digest of the lowered plan."""

from planc.compiler import Compiled
from planc.diagnostic import Sink
from planc.proof.layout_flow import Verdict
from planc.runtime.known_verdict import KnownVerdict, Level
from planc.trial import verdict_store


def record(compiled: Compiled, verdict: Verdict, sink: Sink) -> KnownVerdict:
    """Returns the verdict of layout flow, and keeps it, unless code of the user's own decides it,
    which can change.

    Args:
        compiled: a plan without errors.
        verdict: what layout flow says of it.
        sink: the findings of the check; the first error of the proof is the reason for `refuted`.
    """
    facts, lowered = compiled.facts, compiled.lowered
    level, text = _judged(verdict, sink)
    if facts and lowered and not (facts.code or facts.own is not None or lowered.code):
        verdict_store.remember(lowered, facts, level, text)
    return KnownVerdict(level=level, text=text)


def _judged(verdict: Verdict, sink: Sink) -> tuple[Level, str]:
    """A plan that splits nothing is proved where structure decides all of its sections."""
    if verdict.verdict == "refuted":
        errors = (d for d in sink if d.severity == "error")
        return "refuted", next((f"{d.message} ({d.code})" for d in errors), "its numbers are wrong")
    unknown = next((s.reason for s in verdict.sections if s.verdict == "unknown"), None)
    if verdict.verdict == "unknown" or unknown is not None:
        return "undecided", f"not decided by layout flow: {verdict.reason or unknown}"
    return "proved", "proved"
