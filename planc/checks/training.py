"""PL451, PL452: freezing that changes nothing, or that leaves nothing to train."""

from __future__ import annotations

from planc.diagnostic import Sink
from planc.ir.owners import owned
from planc.ir.plan import Plan
from planc.model.facts import Facts


def training(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A word about parameters that has no parameters, and a model without any that trains."""
    if not plan.train or "train" in plan.broken:
        return
    found = list(owned(plan, facts))
    heard = {own.training for own in found if own.training is not None}
    for rule in plan.train:
        if rule not in heard:
            word = "trainable" if rule.trainable else "frozen"
            empty = not rule.modules.module.count
            reason = "it has no parameters" if empty else "all inside it is decided by other rules"
            sink.error(
                "PL451",
                f"`{rule.modules} : {word}` changes nothing: {reason}",
                rule.origin,
                help="take the rule out",
            )
    if not any(own.trains(p) for own in found for p in own.modules.module.parameters):
        sink.error(
            "PL452",
            "every parameter of the model is frozen: there is nothing to train",
            *(rule.origin for rule in plan.train if not rule.trainable),
            help="let something train: `override ... : trainable`",
        )
