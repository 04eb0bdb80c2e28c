"""The lines below the findings of a check, and the certificate of `planc verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planc.compat import rows
from planc.compiler import Compiled
from planc.diagnostics import render
from planc.diagnostics.diagnostic import Diagnostic, Sink
from planc.model import cache
from planc.ops import phrases
from planc.simulate import certificate
from planc.simulate.certificate import Certificate

if TYPE_CHECKING:
    from planc.proof.layout_flow import Verdict


LEVELS = ("structure", "flow", "order")
"""The levels of a check; each includes those before it."""


class Findings(tuple[Diagnostic, ...]):
    """The findings of a check, which `print` shows as `planc check` does.

    Attributes:
        lines: what the plan lowers to, and what was checked; empty where it does not lower.
    """

    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((render(self, "full").rstrip("\n"), *self.lines))


def note_untested_versions(sink: Sink) -> None:
    """Adds PL744 for installed libraries of versions that no row of tests ran with."""
    if message := rows.untested_message(cache.environment()):
        advice = "`planc verify` proves the plan with these versions on real processes"
        sink.info("PL744", message, help=advice)


def known_certificate(compiled: Compiled, sink: Sink) -> Certificate | None:
    """The result of `planc verify` for a plan, if it was run; PL520 if it refuted the plan."""
    if compiled.facts is None or compiled.lowered is None:
        return None
    if not certificate.keepable(compiled.facts, compiled.lowered):
        return None
    identity = certificate.identity(compiled.facts)
    known = certificate.stored_certificate(compiled.digest, identity, compiled.lowered.packages)
    if known and known["verdict"] == "refuted":
        places = (known.get("first") or {}).get("places", ())
        help = "`planc verify` found this; run it again"
        sink.error(
            "PL520", known["reason"], facts=[f"decided at {place}" for place in places], help=help
        )
    return known


def summary(
    compiled: Compiled, proof: Certificate | None, verdict: Verdict | None, also: str = ""
) -> tuple[str, ...]:
    """The lines below the findings: what the plan lowers to, what was checked, and what was not.

    Args:
        proof: the result of `planc verify`.
        verdict: of layout flow, if it ran.
        also: what else was checked.
    """
    if compiled.lowered is None or compiled.plan is None:
        return ()
    experts = compiled.plan.mesh.experts
    axes = (*compiled.plan.mesh.axes, *((experts.ranks,) if experts else ()))
    on = phrases.mesh(axes) if axes else "the ranks of an engine"
    head = f"{compiled.plan.name} for {compiled.lowered.model} on {on}: lowers to "
    structure = "structure of packed models" if cache.made_with() else "structure"
    flow = f", {verdict.text}" if verdict else ""
    parts = [f"checked: {structure}{flow}{also}"]
    sections = verdict.sections if verdict else ()
    lacking = [section.name for section in sections if section.verdict == "left out"]
    if proof:
        parts.append(certificate.summary(proof) + cache.provenance())
    else:
        lacking = [*lacking, "real processes"]
    if lacking:
        parts.append(f"not checked: {', '.join(lacking)}")
    return f"{head}{compiled.digest[:12]}", "; ".join(parts)
