"""PL188 and PL451 to PL453: rules without effect, and models that do not train."""

from planc.diagnostics.diagnostic import Label, Sink
from planc.ir.nodes import Adapters, Plan
from planc.ir.parameter_owners import owned_modules
from planc.model.facts import Facts, Modules
from planc.ops.freeze import Freeze


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A train rule must match parameters, and some parameter must stay trainable."""
    if plan.adapters is not None and plan.adapters.rules:
        _report_adapted(plan.adapters, plan, sink)
    if not plan.freezes_known:
        return
    found = list(owned_modules(plan, facts))
    heard = {own.training for own in found if own.training is not None}
    for rule in plan.freezes:
        if rule not in heard:
            word = "trainable" if rule.trainable else "frozen"
            empty = not rule.modules.module.count
            other = "other rules decide all parameters inside it"
            reason = "it has no parameters" if empty else other
            message = f"`{rule.modules} : {word}` has no effect: {reason}"
            sink.error("PL451", message, rule.origin, help="remove the rule")
    for group in facts.ties:
        _check_ties(group, plan, facts, sink)
    if not any(own.has_trainable for own in found):
        sink.error(
            "PL452",
            "every parameter of the model is frozen: nothing trains",
            *(rule.origin for rule in plan.freezes if not rule.trainable),
            help="make some modules trainable: `override ... : trainable`",
        )


def _check_ties(group: tuple[str, ...], plan: Plan, facts: Facts, sink: Sink) -> None:
    """Tied parameters are one tensor with one `requires_grad`, so their rules must agree."""
    said = [(name, *facts.find(name)) for name in group]
    rules = [(n, p, _innermost_freeze(m, plan)) for n, m, p in said]
    states = {p.trainable if rule is None else rule.trainable for _, p, rule in rules}
    if len(states) > 1:
        frozen = [n for n, p, r in rules if not (p.trainable if r is None else r.trainable)]
        other = next(n for n in group if n not in frozen)
        labels = [Label(span=r.origin, text=f"decides {n}") for n, _, r in rules if r is not None]
        message = f"`{frozen[0]}` and `{other}` are tied, and only the first is frozen"
        sink.error("PL453", message, *labels, help=f"freeze `{other.rpartition('.')[0]}` too")


def _innermost_freeze(modules: Modules, plan: Plan) -> Freeze | None:
    inside = [t for t in plan.freezes if modules.is_within(t.modules)]
    return inside[-1] if inside else None  # outer ones come first


def _report_adapted(section: Adapters, plan: Plan, sink: Sink) -> None:
    for rule in plan.freezes:
        if not rule.trainable:
            sink.error(
                "PL188",
                f"`{rule.modules}` is already frozen by the adapters section",
                rule.origin,
                Label(span=section.origin, text="adapters; all other parameters are frozen"),
                facts=["the rule would freeze the adapters inside, too"],
                help="remove the rule",
            )
