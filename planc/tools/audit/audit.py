"""A model type of transformers -> verdicts on its plans, and findings at their lines."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from planc.diagnostics.diagnostic import Sink, did_you_mean
from planc.tools.audit.styles import STYLES

if TYPE_CHECKING:
    from planc.diagnostics.source import Span
    from planc.tools.audit.apply import AuditedModel, StepErrors
    from planc.tools.audit.repair import Repair

KINDS = ("tp_plan", "ep_plan", "fsdp_plan", "pp_plan")
"""The plans of a type: tensor, expert and data parallelism, and pipeline stages at inference."""
REPAIRED = ("tp_plan", "ep_plan")
"""The plans whose rules are changed; an FSDP or pipeline plan only lists modules."""
_HELP = "name another type; `planc list models` has models, not types"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    """The verdict on one plan of one type.

    Args:
        type, kind: the model type, and a word of KINDS.
        verdict: `proved`, `wrong`, `crash` or `unknown`.
        reason: of a crash, or of a plan of which nothing is known.
        tensor, error: the tensor that is most wrong, and its relative error.
        rule: the name of the rule at fault; empty without a repair.
        patch: for `git apply` in a checkout of transformers; empty without one.
    """

    type: str
    kind: str
    verdict: str
    reason: str = ""
    tensor: str = ""
    error: float = 0.0
    rule: str = ""
    patch: str = ""

    def document(self) -> dict[str, Any]:
        """The verdict as JSON."""
        error = self.error if isfinite(self.error) else None
        names = ("type", "kind", "verdict", "reason", "tensor", "rule", "patch")
        return {name: getattr(self, name) for name in names} | {"error": error}


def audit(
    types: Iterable[str],
    sink: Sink,
    kinds: Iterable[str] = KINDS,
    *,
    repaired: Collection[str] = REPAIRED,
) -> Iterator[PlanVerdict]:
    """Yields the verdict on each plan of each type; a plan that a type lacks has none.

    Args:
        sink: receives PL764 to PL766, and PL600 for a type that transformers lacks.
        kinds: words of KINDS.
        repaired: the kinds for which the changes that make a plan right are searched.
    """
    for name in types:
        if audited := _audited_model(name, sink):
            yield from audit_model(name, audited, sink, kinds, repaired=repaired)


def audit_model(
    name: str,
    audited: "AuditedModel",
    sink: Sink,
    kinds: Iterable[str] = KINDS,
    *,
    repaired: Collection[str] = REPAIRED,
) -> Iterator[PlanVerdict]:
    """Yields the verdict on each plan of a proxy model; arguments as of `audit`."""
    for kind in kinds:
        if rules := audited.plan(kind):
            yield _judge(name, kind, audited, rules, sink, repaired=kind in repaired)


def _audited_model(name: str, sink: Sink) -> "AuditedModel | None":
    """The proxy model of a type, or None after PL600 or PL766."""
    from planc.model.load import load_values
    from planc.model.sources.default_configs import default_config, model_types
    from planc.proof.small_case import small_model
    from planc.tools.audit.apply import AuditedModel

    if name not in (known := model_types()):
        message = f"transformers has no model type '{name}'"
        sink.error("PL600", message, help=did_you_mean(name, known, _HELP))
        return None
    quiet = Sink()
    try:
        facts = load_values(default_config(name), name, quiet)
        small = small_model(facts) if facts else next(d.message for d in quiet)
        if not isinstance(small, str):
            return AuditedModel(small.builder())
        reason = small
    except Exception as error:  # of transformers' code, for its own default configuration
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    sink.warning("PL766", f"{name} is not judged: {reason}", help=_HELP)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refuted:
    """A plan that is not proved, its run, and the changes that make it right."""

    title: str
    kind: str
    rules: Mapping[str, Any]
    run: "StepErrors"
    repair: "Repair | None"
    span: "Span | None"
    patch: str


def _judge(
    name: str,
    kind: str,
    audited: "AuditedModel",
    rules: Mapping[str, Any],
    sink: Sink,
    *,
    repaired: bool,
) -> PlanVerdict:
    from planc.tools.audit.patch import patch, plan_owners, rule_span
    from planc.tools.audit.repair import find_repair

    run, title = audited.run(kind, rules), f"the {kind} of {name}"
    if run.verdict == "proved":
        return PlanVerdict(type=name, kind=kind, verdict="proved")
    if run.verdict == "unknown":
        sink.warning("PL766", f"{title} is not judged: {run.reason}")
        return PlanVerdict(type=name, kind=kind, verdict="unknown", reason=run.reason)
    owners = plan_owners(audited.model)
    repair = find_repair(lambda r: audited.run(kind, r), rules, run) if repaired else None
    refuted = _Refuted(
        title=title,
        kind=kind,
        rules=rules,
        run=run,
        repair=repair,
        span=rule_span(owners, kind, repair.first if repair else next(iter(rules))),
        patch=patch(owners, kind, repair) if repair else "",
    )
    _report(refuted, sink)
    tensor, error = run.worst if run.verdict == "wrong" else ("", 0.0)
    return PlanVerdict(
        type=name,
        kind=kind,
        verdict=run.verdict,
        reason=run.reason,
        tensor=tensor,
        error=error,
        rule=repair.first if repair else "",
        patch=refuted.patch,
    )


def _report(refuted: _Refuted, sink: Sink) -> None:
    """Reports PL764 or PL765 at the rule at fault, with the changes that make the plan right."""
    run, facts = refuted.run, _facts(refuted)
    where, help = [refuted.span] if refuted.span else [], _help(refuted)
    if run.verdict == "crash":
        message = f"{refuted.title} does not run on 2 ranks: {run.reason}"
        sink.error("PL765", message, *where, facts=facts, help=help)
        return
    tensor, error = run.worst
    what = tensor if tensor.startswith("the ") else f"the gradient of {tensor}"
    if not tensor.startswith("the "):
        facts = ["the logits are right: only training is wrong", *facts]
    verb = "computes" if refuted.kind == "pp_plan" else "trains"  # stages are for inference
    message = f"{refuted.title} {verb} another model: {what} is off by {error:.2g}"
    sink.error("PL764", message, *where, facts=facts, help=help)


def _facts(refuted: _Refuted) -> list[str]:
    """The effect of the styles at fault and of their replacements, with transformers' lines."""
    from planc.tools.audit.styles import code_place

    repair = refuted.repair
    if repair is None:
        return []
    styles = [str(refuted.rules[name]) for name in (*repair.removed, *repair.changed)]
    styles += [*repair.changed.values(), *repair.added.values()]
    return [
        f"`{style}` {STYLES[style].forward}; backward {STYLES[style].backward}  "
        f"(transformers/{code_place(style)})"
        for style in dict.fromkeys(styles)
        if style in STYLES
    ]


def _help(refuted: _Refuted) -> str:
    repair = refuted.repair
    if repair is None and refuted.kind not in REPAIRED:
        return "its rules only name modules: the code of transformers or of the model is at fault"
    if repair is None:
        return "no subset of its rules is proved: the model's code needs a change"
    edits = [
        *(f"remove `{name}`" for name in repair.removed),
        *(f"write `{name}: {style}`" for name, style in repair.changed.items()),
        *(f"add `{name}: {style}`" for name, style in repair.added.items()),
    ]
    file = " (`--patch FILE` writes these lines)" if refuted.patch else ""
    return f"{'; '.join(edits)}; the plan is then proved{file}"
