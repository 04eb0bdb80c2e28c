"""Checks that the random numbers of the ranks are distributed as in the reference run.

The proxy model is trained once more, with its dropout. The reference run reuses the random numbers
of the ranks, so outputs and gradients can be compared. Ranks that hold the same activations must
have the same numbers, and ranks with different shards different ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Label, Severity, Sink
from planc.ir.nodes import Plan
from planc.ir.random_numbers import drawing_fields
from planc.ir.stand_in import Unrepresented
from planc.model.config_fields import DROPOUT
from planc.model.facts import Facts
from planc.model.randomness import with_noise
from planc.proof.flow_findings import what_is_wrong
from planc.proof.responsible_rules import rule_labels
from planc.proof.small_case import SmallCase, small_case
from planc.simulate.outcome import Discrepancy, Outcome

_LEAST = 0.1
"""The least dropout of the proxy model: with less, a small tensor may lose nothing."""
_STATE = (
    "the `draws` lines of `planc lower` list where random numbers differ by rank; a style that "
    "states the layout there adds one"
)


def dropout_case(compiled: Compiled, sizes: Mapping[str, int]) -> SmallCase | None:
    """Returns the proxy model with the real model's dropout; None if there is no dropout, or if no
    proxy model represents the real one.
    """
    assert compiled.plan is not None and compiled.facts is not None
    if not drawing_fields(compiled.plan, compiled.facts):
        return None
    small = small_case(compiled, sizes)
    if isinstance(small, Unrepresented):
        return None
    values = with_noise(small.model.values, compiled.facts.config, _dropout)
    return replace(small, model=replace(small.model, values=values, dropout=True))


def _dropout(name: str, value: Any) -> float | None:
    """The dropout of the proxy model; no layer is skipped as a whole."""
    if not DROPOUT.search(name) or name.endswith("layerdrop"):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return max(_LEAST, float(value)) if number and value > 0 else None


def report_random_numbers(
    outcome: Outcome, small: Plan, facts: Facts, sink: Sink, *, strict: bool
) -> bool:
    """Reports random numbers unlike those of the reference run (PL511), or that cannot be compared
    (PL504), after a run that was right without dropout.

    Returns:
        Whether the plan trains another model.
    """
    if outcome.verdict == "unknown":
        sink.report(
            Severity.ERROR if strict else Severity.WARNING,
            "PL504",
            "layout flow cannot decide whether the random numbers of the ranks are right: "
            f"{outcome.reason}",
        )
    if outcome.verdict != "refuted":
        return False
    draws = outcome.of_kind("draws")
    first = next((d for d in draws if d.error), (*draws, *outcome.discrepancies)[0])
    wrong = first.kind != "draws" or first.error > 0
    labels, help = list(rule_labels(first.subject, small)), _STATE
    if lax := [c.origin for c in small.checkpoint_rules if not c.preserve_rng and not draws]:
        labels = [Label(span=at, text="recomputes with different random numbers") for at in lax]
        help = "remove `preserve_rng = false`, which is for blocks without dropout"
    sink.report(
        Severity.ERROR if wrong else Severity.WARNING,
        "PL511",
        f"with dropout, {_what(first)}",
        *labels,
        facts=[
            *([f"the model's own code: {first.line}"] if first.line else []),
            f"training uses random numbers: {', '.join(drawing_fields(small, facts))}",
            "seen on a proxy model, with all ranks simulated, and right without dropout",
        ],
        help=help,
    )
    return wrong


def _what(first: Discrepancy) -> str:
    where = f"`{first.subject or 'the model'}`"
    if first.kind == "draws":
        return f"{first.detail}, in {where}"
    return what_is_wrong(first.kind, where) + (f": {first.detail}" if first.kind == "crash" else "")
