"""PL451, PL452, PL453: freezing without effect, with nothing left to train, or across a tie."""

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts, Modules
from planc.ops.freeze import Freeze
from planc.plan.ir import Plan
from planc.plan.parameter_owners import owned


def freezing(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A train rule must match parameters, and some parameter must stay trainable."""
    if not plan.train or "train" in plan.broken:
        return
    found = list(owned(plan, facts))
    heard = {own.training for own in found if own.training is not None}
    for rule in plan.train:
        if rule not in heard:
            word = "trainable" if rule.trainable else "frozen"
            empty = not rule.modules.module.count
            other = "other rules decide all parameters inside it"
            reason = "it has no parameters" if empty else other
            message = f"`{rule.modules} : {word}` has no effect: {reason}"
            sink.error("PL451", message, rule.origin, help="remove the rule")
    for group in facts.ties:
        _tied(group, plan, facts, sink)
    if not any(own.trains(p) for own in found for p in own.modules.module.parameters):
        sink.error(
            "PL452",
            "every parameter of the model is frozen: nothing trains",
            *(rule.origin for rule in plan.train if not rule.trainable),
            help="make some modules trainable: `override ... : trainable`",
        )


def _tied(group: tuple[str, ...], plan: Plan, facts: Facts, sink: Sink) -> None:
    """Tied parameters are one tensor with one `requires_grad`, so their rules must agree."""
    said = [(name, *facts.find(name)) for name in group]
    rules = [(n, p, _around(m, plan)) for n, m, p in said]
    states = {p.trainable if rule is None else rule.trainable for _, p, rule in rules}
    if len(states) > 1:
        frozen = [n for n, p, r in rules if not (p.trainable if r is None else r.trainable)]
        other = next(n for n in group if n not in frozen)
        labels = [Label(span=r.origin, text=f"decides {n}") for n, _, r in rules if r is not None]
        message = f"`{frozen[0]}` and `{other}` are tied, and only the first is frozen"
        sink.error("PL453", message, *labels, help=f"freeze `{other.rpartition('.')[0]}` too")


def _around(modules: Modules, plan: Plan) -> Freeze | None:
    inside = [t for t in plan.train if modules.within(t.modules)]
    return inside[-1] if inside else None  # outer ones come first
