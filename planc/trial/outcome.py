"""What a simulation found, as data that can be kept; nothing here needs torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LIMIT = 1e-4
"""Largest relative error that counts as equal, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discrepancy:
    """Where the two runs part, or where a tensor is not laid out as the plan says.

    Args:
        kind: `output`, `gradient`, `partial` (a gradient whose sum over the ranks is right, and
            that nothing sums), `missing` (no gradient), `crash`, `size` (positions or ids of
            another length), `boundary` (what arrives is not what a rule says), or `unstated` (a
            redistribution that no rule states).
        subject: the torch name of a module or of a parameter, empty where it is not known.
        error: the relative error, where there is one.
        detail: what is wrong, such as torch's message.
        layouts: of a `boundary`, the one that the plan states and the one that arrives; of what
            is `unstated`, the one before the redistribution and the one after it.
        op: torch's name of the operation that an `unstated` redistribution is made for.
        line: of the model's own code.
        before: the module without modules inside that ended last before a crash.
    """

    kind: str
    subject: str
    error: float = 0.0
    detail: str = ""
    layouts: tuple[str, ...] = ()
    op: str = ""
    line: str = ""
    before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulation found.

    Args:
        verdict: `proved`, `refuted`, `unknown`, or `nothing` where no axis is tensor parallel.
        reason: why it is unknown.
        discrepancies: where the runs part, the first in execution order in front.
        logits, loss, gradient: the largest relative errors.
        modules: the largest error of each module's output and own gradients, by name; None
            where the run did not get there.
        again: a module that the model's own code runs once more in the backward pass, if any.
        unfed: why a tower of the model got no input, empty where all did.
    """

    verdict: str
    reason: str = ""
    discrepancies: tuple[Discrepancy, ...] = ()
    logits: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    modules: tuple[tuple[str, float | None], ...] = ()
    recomputed: str = ""
    missing_inputs: str = ""

    @property
    def worst(self) -> float:
        """The largest of the errors."""
        return max(self.logits, self.loss, self.gradient)

    @property
    def first(self) -> Discrepancy | None:
        """Where the outputs part first, or the run died."""
        return next((p for p in self.discrepancies if p.kind in ("crash", "output")), None)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def outcome_of(kept: Any) -> Outcome | None:
    """The outcome that `document` wrote, or None where this is none."""
    if not isinstance(kept, dict):
        return None
    try:
        found = tuple(
            Discrepancy(**{**d, "layouts": tuple(d["layouts"])}) for d in kept["discrepancies"]
        )
        modules = tuple((str(n), None if e is None else float(e)) for n, e in kept["modules"])
        return Outcome(**{**kept, "discrepancies": found, "modules": modules})
    except (KeyError, TypeError, ValueError):
        return None
