"""The train sections -> which parameters take gradients."""

from planc.ops.freeze import Freeze
from planc.plan.call_arguments import Arguments
from planc.plan.program import Program
from planc.plan.rule_conflicts import Claims
from planc.plan.sections.tensor import modules_of, no_axes, rules_of

_STATES = {"frozen": False, "trainable": True}


def train(program: Program) -> tuple[Freeze, ...]:
    """The frozen and the trainable modules, outer modules before those inside them.

    A rule applies to all submodules without a rule of their own, so two rules conflict only where
    they name the same module.
    """
    claims: Claims[Freeze | None] = Claims(program.sink)
    for section in program.named("train"):
        no_axes(section, program)
        for rule, placed in rules_of(section, tuple(_STATES), "state", program):
            if Arguments(rule.action, program.scope).done():
                found = modules_of(rule, placed, program.scope)
                op = Freeze(modules=program.facts.model, trainable=_STATES[rule.action.name])
                claims.add(found, "training", op, rule.origin, override=rule.override)
    return tuple(sorted(claims.ops(), key=lambda t: len(t.modules.path)))
