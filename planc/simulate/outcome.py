"""The outcome of a simulation, as data that can be cached; imports no torch."""

from dataclasses import asdict, dataclass, fields
from typing import Any

LIMIT = 1e-4
"""The largest relative error that counts as equal, in float32."""
PARAMETER_LIMIT = 1e-3
"""The same for parameters after two steps of AdamW."""
RIGHT = ("mean", "rows", "buffer", "microbatch", "unstated")
"""The kinds of discrepancies that refute no plan."""
LOSS_ALONE = "the loss differs, and the logits do not"
"""The detail of a wrong output of a model that returns its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discrepancy:
    """A difference between the two runs, or between a tensor's layout and the plan.

    Args:
        kind: `output`, `gradient`, `partial` (a gradient that is right when summed over the
            ranks, and that nothing all-reduces), `missing` (no gradient), `norm` (of all
            gradients), `parameter` (after two steps), `crash`, `size` (positions or ids of another
            length), `mean` (a loss that is another one over the rows of each data rank), `rows` (a
            module whose output for a row depends on the others), `microbatch`
            (such a module under a pipeline that is wrong), `buffer` (a buffer that a forward pass
            computes from its rows), `uneven` (a parameter that only some data ranks use),
            `context` (any of these, if the ranks have sequence shards, and right without),
            `lengths` (any of these, where ranks have unlike numbers of tokens, else right),
            `draws` (random numbers of the ranks unlike those of the plain model; the error is
            0 if only their distribution is another one), `boundary` (the layout that arrives is
            not the stated one), or `unstated` (a redistribution that no rule states).
        subject: the torch name of a module or parameter, empty if not known.
        error: the relative error, if there is one.
        detail: a description, such as torch's message.
        layouts: for `boundary`, the stated layout and the one that arrives; for `unstated`, the
            layouts before and after the redistribution.
        op: torch's name of the op that causes an `unstated` redistribution.
        line: the line of the model's code.
        before: the leaf module that ended last before a crash.
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
    """The outcome of a simulation.

    Args:
        verdict: `proved`, `refuted`, `unknown`, or `nothing` if no axis is tensor parallel.
        discrepancies: in execution order.
        logits, loss, gradient, norm, parameters: the largest relative errors; `norm` is that of all
            gradients, `parameters` are those after two steps.
        modules: the largest error of each module's output and own gradients, by name; None if the
            run did not reach it.
        recomputed: a module that the model's own code runs again in the backward pass, if any.
        input_kinds: the kinds of inputs besides text that the model got, such as `images`.
        missing_inputs: why a tower of the model got no input, empty if all did.
        lacks: the inputs that it got none of, such as `images`.
        passes: what its batches were built to show, such as `padding`.
    """

    verdict: str
    reason: str = ""
    discrepancies: tuple[Discrepancy, ...] = ()
    logits: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    norm: float = 0.0
    parameters: float = 0.0
    modules: tuple[tuple[str, float | None], ...] = ()
    recomputed: str = ""
    input_kinds: tuple[str, ...] = ()
    missing_inputs: str = ""
    lacks: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """The largest of the errors."""
        return max(self.logits, self.loss, self.gradient)

    @property
    def first(self) -> Discrepancy | None:
        """The first wrong output or the crash."""
        return next((p for p in self.discrepancies if p.kind in ("crash", "output")), None)

    def of_kind(self, kind: str) -> list[Discrepancy]:
        return [discrepancy for discrepancy in self.discrepancies if discrepancy.kind == kind]

    def document(self) -> dict[str, Any]:
        """The outcome as JSON data."""
        return asdict(self)


def outcome_of(kept: Any) -> Outcome | None:
    """The inverse of `document`; None if the data is not an outcome."""
    if not isinstance(kept, dict):
        return None
    try:
        discrepancies = tuple(
            Discrepancy(**{**d, "layouts": tuple(d["layouts"])}) for d in kept["discrepancies"]
        )
        modules = tuple((str(n), None if e is None else float(e)) for n, e in kept["modules"])
        named = {
            field: tuple(map(str, kept[field])) for field in ("input_kinds", "lacks", "passes")
        }
        outcome = Outcome(**{**kept, "discrepancies": discrepancies, "modules": modules, **named})
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    known = outcome.verdict in ("proved", "refuted", "unknown", "nothing")
    return outcome if known and _sound(outcome) and all(map(_sound, discrepancies)) else None


def _sound(record: Outcome | Discrepancy) -> bool:
    """Whether the texts and numbers of a record are texts and numbers."""
    kinds: dict[object, tuple[type, ...]] = {str: (str,), float: (int, float)}
    typed = ((getattr(record, f.name), kinds.get(f.type)) for f in fields(record))
    return all(isinstance(value, kind) for value, kind in typed if kind)
