"""The train sections -> which parameters take gradients."""

from planc.elaborate.call_arguments import Arguments
from planc.elaborate.program import Program
from planc.elaborate.sections.tensor import read_claims
from planc.ops.freeze import Freeze
from planc.syntax import ast

_STATES = {"frozen": False, "trainable": True}


def read(program: Program) -> tuple[Freeze, ...]:
    """The frozen and the trainable modules, outer modules before those inside them.

    A rule applies to all submodules without a rule of their own, so two rules conflict only where
    they name the same module.
    """

    def rule_of(rule: ast.Rule) -> tuple[Freeze | None] | None:
        op = Freeze(modules=program.facts.model, trainable=_STATES[rule.action.name])
        return (op,) if Arguments(rule.action, program.scope).done() else None

    claims = read_claims(program, "train", tuple(_STATES), "state", rule_of, aspect="training")
    return tuple(sorted(claims.rules(), key=lambda t: len(t.modules.path)))
