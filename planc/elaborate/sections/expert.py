"""The expert section -> expert-parallel modules."""

from planc.diagnostics.diagnostic import did_you_mean
from planc.elaborate.call_arguments import Arguments, word
from planc.elaborate.evaluate import is_integer
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import Claims
from planc.elaborate.sections.tensor import modules_of, rules_of
from planc.ir.mesh_axes import EXPERTS
from planc.ir.nodes import ExpertRule
from planc.ops.expert_capacity import POSITION, PROBS
from planc.ops.expert_parallel import ALL_REDUCE, ALL_TO_ALL
from planc.syntax import ast

_WAYS = (ALL_TO_ALL, ALL_REDUCE)


def expert(program: Program) -> tuple[ExpertRule, ...]:
    """The rules of the expert sections, in the plan's order."""
    claims: Claims[ExpertRule | None] = Claims(program.sink)
    for section in program.sections_named("expert"):
        if len(section.axes) != 1 or section.replicate:
            message = "an expert section works over the ranks that divide experts"
            hint = f"write `expert on {EXPERTS} {{`"
            program.sink.error("PL305", message, section.name_origin, help=hint)
        for rule, placed in rules_of(section, ("dispatch",), "expert action", program):
            modules, dispatch = modules_of(rule, placed, program.scope), _way(rule, program)
            if dispatch is not None:
                claims.add(modules, "dispatch", dispatch, rule.origin, override=rule.override)
    return claims.rules()


def _way(rule: ast.Rule, program: Program) -> ExpertRule | None:
    """The rule of `dispatch(all_to_all, chunks = 2, capacity = 1.25)`, or None after a finding."""
    call = rule.action
    arguments = Arguments(call, program.scope, ("chunks", "capacity", "drop"))
    value = word(arguments.positional[0].value, program.scope) if arguments.positional else None
    chunks = arguments.read("chunks", 1, "a positive integer", lambda v: is_integer(v) and v > 0)
    capacity = arguments.number("capacity", None, "a positive number", lambda v: v > 0)
    drop = arguments.word("drop", {PROBS: PROBS, POSITION: POSITION}, None)
    if not arguments.done(positional=1):
        return None
    if not (isinstance(value, str) and value in _WAYS):
        hint = "`all_to_all` sends tokens to their experts, `all_reduce` sums what ranks compute"
        meant = did_you_mean(value, _WAYS, hint) if isinstance(value, str) else hint
        arguments.wrong(call, "`dispatch` needs a way for tokens to come to their experts", meant)
        return None
    if value != ALL_TO_ALL and chunks > 1:
        hint = "remove `chunks`, or write `all_to_all`"
        arguments.wrong(call, f"`{value}` does not send tokens in chunks", hint)
        return None
    if drop is not None and capacity is None:
        hint = "add `capacity = 1.25`, or remove `drop`"
        arguments.wrong(call, "without `capacity` no token is dropped", hint)
        return None
    return ExpertRule(
        modules=program.facts.model,
        dispatch=value,
        chunks=chunks,
        capacity=capacity,
        drop=drop or PROBS,
        origin=rule.origin,
    )
