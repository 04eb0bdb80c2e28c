"""The expert section -> fused experts that ranks divide among them."""

from planc.ops.expert_parallel import ALL_REDUCE, ALL_TO_ALL
from planc.plan.call_arguments import Arguments, word
from planc.plan.ir import ExpertRule
from planc.plan.mesh_axes import EXPERTS
from planc.plan.program import Program
from planc.plan.rule_conflicts import Claims
from planc.plan.sections.tensor import modules_of, rules_of
from planc.syntax import ast

_WAYS = (ALL_TO_ALL, ALL_REDUCE)


def expert(program: Program) -> tuple[ExpertRule, ...]:
    """The rules of the expert sections, in the plan's order."""
    claims: Claims[ExpertRule | None] = Claims(program.sink)
    for section in program.named("expert"):
        if len(section.axes) != 1 or section.replicate:
            message = "an expert section works over the ranks that divide experts"
            hint = f"write `expert on {EXPERTS} {{`"
            program.sink.error("PL305", message, section.name_origin, help=hint)
        for rule, placed in rules_of(section, ("dispatch",), "expert action", program):
            found, way = modules_of(rule, placed, program.scope), _way(rule.action, program)
            if way is not None:
                made = ExpertRule(modules=program.facts.model, dispatch=way, origin=rule.origin)
                claims.add(found, "dispatch", made, rule.origin, override=rule.override)
    return claims.rules()


def _way(call: ast.Call, program: Program) -> str | None:
    """The argument of `dispatch(all_to_all)`, or None after a finding."""
    arguments = Arguments(call, program.scope, _WAYS)
    value = word(arguments.positional[0].value, program.scope) if arguments.positional else None
    if not arguments.done(positional=1):
        return None
    if isinstance(value, str) and value in _WAYS:
        return value
    hint = "`all_to_all` sends tokens to their experts, `all_reduce` sums what each rank computes"
    arguments.wrong(call, "`dispatch` needs a way for tokens to come to their experts", hint)
    return None
