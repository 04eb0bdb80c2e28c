"""Reads the matmul section: the linear layers with fp8 or mxfp8 matmuls."""

from planc.elaborate.call_arguments import Arguments
from planc.elaborate.program import Program
from planc.elaborate.sections.tensor import read_claims
from planc.sections.matmul.ops import LowPrecision
from planc.syntax import ast

ACTIONS = ("fp8", "mxfp8", "none")
_RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise"}
_GATHER = {"fp8": True}


def read(program: Program) -> tuple[LowPrecision, ...]:
    """The operations of all matmul sections; `none` keeps layers in the parameters' dtype."""

    def rule_of(rule: ast.Rule) -> tuple[LowPrecision | None] | None:
        call = rule.action
        arguments = Arguments(call, program.scope, ("recipe", "gather") * (call.name == "fp8"))
        recipe, gather = call.name, False
        if call.name == "fp8":
            recipe = arguments.word("recipe", _RECIPES, "tensorwise")
            gather = arguments.word("gather", _GATHER, False)
        if not arguments.done():
            return None
        op = LowPrecision(modules=program.facts.model, recipe=recipe, gather=gather)
        return (None,) if call.name == "none" else (op,)

    claims = read_claims(program, "matmul", ACTIONS, "precision", rule_of, aspect="matmul")
    return claims.rules()
