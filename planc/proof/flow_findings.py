"""Reports the discrepancies of layout flow at the lines of the plan, with the model's source
line.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from planc.diagnostic import Label, Severity, Sink
from planc.model.facts import below
from planc.plan.ir import Plan
from planc.proof.responsible_rules import rule_labels
from planc.trial.outcome import Discrepancy, Outcome

_SEEN = "seen on a small model, with all ranks simulated"
_MOST = 8
"""The most findings of one kind."""


def report_refuted(outcome: Outcome, small: Plan, sink: Sink) -> None:
    """Reports what differs: outputs (PL501), crashes (PL503), gradients (PL502), sizes (PL507), and
    the norm or the parameters after two steps (PL509).

    Only the first wrong output is reported, because the outputs after it differ as a consequence.
    """
    groups = _groups(outcome)
    first = [g for g in groups if g[0].kind in ("output", "crash")][:1]
    sizes = [g for g in groups if g[0].kind == "size"][:1]
    gradients = [g for g in groups if g[0].kind in _OF_PARAMETERS]
    for group in (*sizes, *(first or gradients[:_MOST])):
        _REPORTERS.get(group[0].kind, _gradient)(group, small, sink)


def report_means(outcome: Outcome, sink: Sink) -> None:
    """Reports a loss whose mean over the data ranks is not that of the whole batch (PL510)."""
    for mismatch in outcome.discrepancies:
        if mismatch.kind == "mean":
            sink.warning(
                "PL510",
                "the loss of the whole batch is not the mean over the data ranks: each rank's part "
                "of it is computed on its own rows",
                facts=[
                    f"the gradient of `{generic(mismatch.subject)}` differs by "
                    f"{mismatch.error:.1e} from that of the whole batch in one process",
                    _SEEN,
                ],
                help="gradient accumulation in one process computes the same as the data ranks "
                "do; an auxiliary loss, such as a router's, is the usual cause",
            )


def report_unstated(outcome: Outcome, small: Plan, sink: Sink) -> None:
    """Reports layouts (PL505) and redistributions (PL506) that the plan does not state."""
    wrong = outcome.verdict == "refuted"
    for kind in ("boundary", "unstated"):
        for group in [g for g in _groups(outcome) if g[0].kind == kind][: 1 if wrong else _MOST]:
            mismatch, subject = group[0], generic(group[0].subject)
            labels = list(rule_labels(mismatch.subject, small))
            facts = [*_source(mismatch), _SEEN]
            before, after = mismatch.layouts
            if kind == "boundary":
                severity = Severity.ERROR if wrong else Severity.WARNING
                message = f"the input of `{subject}` has layout {after}; "
                message += f"the plan states {before}"
                advice = f"state this layout: `{after} -> ...` instead of `{before} -> ...`"
                sink.report(severity, "PL505", message, *labels, facts=facts, help=advice)
            elif not wrong:
                change = f"{before} -> {after} (for {mismatch.op})"
                message = (
                    f"implicit redistribution in `{subject or 'the model'}`, which no rule "
                    f"states: {change}"
                )
                labels = _with_before(labels, mismatch, small)
                advice = "state it with a style, `input(...)` or `output(...)`, or keep it implicit"
                sink.warning("PL506", message, *labels, facts=facts, help=advice)


def _groups(outcome: Outcome) -> list[list[Discrepancy]]:
    """The discrepancies, grouped by identical modules."""
    groups: dict[tuple[str, str, tuple[str, ...], str], list[Discrepancy]] = {}
    for mismatch in outcome.discrepancies:
        key = (mismatch.kind, generic(mismatch.subject), mismatch.layouts, mismatch.op)
        groups.setdefault(key, []).append(mismatch)
    return list(groups.values())


def generic(name: str) -> str:
    """A torch name with every list index as `*`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _source(mismatch: Discrepancy) -> list[str]:
    return [f"the model's own code: {mismatch.line}"] if mismatch.line else []


def _with_before(labels: list[Label], mismatch: Discrepancy, small: Plan) -> list[Label]:
    """The labels, and those of the rules for the module that ended last."""
    marked = {label.span for label in labels}
    before = [
        label.span for label in rule_labels(mismatch.before, small) if label.span not in marked
    ]
    return [*labels, *(Label(span=span, text="ended just before") for span in before)]


def _crash(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    labels = _with_before(list(rule_labels(mismatch.subject, small)), mismatch, small)
    message = f"the model raises in `{subject}` under this plan"
    facts = [mismatch.detail, *_source(mismatch), _SEEN]
    sink.error("PL503", message, *labels, facts=facts)


def _output(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    facts = [f"the first output that differs, by {mismatch.error:.1e}"]
    facts += [mismatch.detail] if mismatch.detail else []
    message = f"the output of `{subject or 'the model'}` is wrong under this plan"
    facts += [*_source(mismatch), _SEEN]
    labels = _with_before(list(rule_labels(mismatch.subject, small)), mismatch, small)
    sink.error("PL501", message, *labels, facts=facts)


def _gradient(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    module = mismatch.subject.rpartition(".")[0]
    worst = max(p.error for p in group)
    help = None
    if mismatch.kind == "partial":
        message = f"the gradient of `{subject}` is partial on each rank, and nothing reduces it"
        detail = f"the ranks' gradients differ by up to {worst:.1e}"
        last = module.rpartition(".")[2]
        help = (
            f"give it a style that reduces its gradient: `{last} : sequence(dim = ..., local = "
            "true)`"
        )
    else:
        message = f"the gradient of `{subject}` is wrong under this plan"
        detail = f"relative error {worst:.1e}"
        detail += f"; {mismatch.detail}" if mismatch.detail else ""
    facts = [detail, *_source(mismatch), _SEEN]
    sink.error("PL502", message, *rule_labels(module, small), facts=facts, help=help)


def _later(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    if mismatch.kind == "norm":
        message = "the norm of the gradients is wrong under this plan, so clipping is"
    else:
        message = f"`{subject}` is wrong after two steps under this plan"
    facts = [f"relative error {mismatch.error:.1e}, while every gradient is right", _SEEN]
    labels = rule_labels(mismatch.subject.rpartition(".")[0], small)
    sink.error("PL509", message, *labels, facts=facts)


def _size(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    message = (
        f"`{subject}` gets {mismatch.detail}: the length of a local shard, not of the sequence"
    )
    sink.error(
        "PL507",
        message,
        *rule_labels(mismatch.subject, small),
        facts=[*_source(mismatch), _SEEN],
        help="return the sharded activations as a DTensor, which has the global size: `local = "
        "false`",
    )


def report_uncalled(ran: Set[str], plan: Plan, sink: Sink) -> bool:
    """Reports units whose module is never called although modules inside it are (PL508).

    FSDP all-gathers a unit's parameters when its module is called.

    Args:
        ran: the names of the called modules, as they are or with `*` for indices.
        plan: the plan with the units.
        sink: receives the findings.

    Returns:
        Whether there are such units.
    """
    found = False
    for unit in plan.fsdp.units if plan.fsdp else ():
        for modules in unit.members:
            every = ((n, generic(n)) for n in modules.names() if n)
            name, star = next((n for n in every if ran.isdisjoint(n)), ("", ""))
            inside = next((n for n in sorted(ran) if below(n, name) or below(n, star)), None)
            if not name or inside is None:
                continue
            found = True
            sink.error(
                "PL508",
                f"`{star}` is an FSDP unit and is never called as a module",
                unit.origin,
                facts=[
                    f"the model's own code calls `{generic(inside)}` inside it",
                    "seen in a run of the model, made small where it has a configuration",
                ],
                help="make the called module the unit, or leave its parameters in the root unit",
            )
    return found


_REPORTERS: dict[str, Callable[[list[Discrepancy], Plan, Sink], None]] = {
    "crash": _crash,
    "output": _output,
    "size": _size,
    "norm": _later,
    "parameter": _later,
}
_OF_PARAMETERS = ("gradient", "partial", "missing", "norm", "parameter")
