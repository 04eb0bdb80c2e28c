"""The train sections -> which parameters take gradients."""

from planc.ops.freeze import Freeze
from planc.plan.call_arguments import Arguments, unknown
from planc.plan.program import Program
from planc.plan.rule_conflicts import Claims, flatten
from planc.plan.sections.tensor import modules_of, no_axes, rule_of

_STATES = {"frozen": False, "trainable": True}


def train(program: Program) -> tuple[Freeze, ...]:
    """The frozen and the trainable modules, outer modules before those inside them.

    A rule applies to all submodules without a rule of their own, so two rules conflict only where
    they name the same module.
    """
    claims: Claims[Freeze | None] = Claims(program.sink)
    for section in program.named("train"):
        no_axes(section, program)
        for placed in flatten(section, program.scope):
            rule = rule_of(placed, "train", program)
            if rule is None:
                continue
            if rule.action.name not in _STATES:
                unknown(rule.action, tuple(_STATES), "state", program.scope)
            elif Arguments(rule.action, program.scope).done():
                found = modules_of(rule, placed, program.scope)
                op = Freeze(modules=program.facts.model, trainable=_STATES[rule.action.name])
                claims.add(found, "training", op, rule.origin, override=rule.override)
    return tuple(sorted(claims.ops(), key=lambda t: len(t.modules.path)))
