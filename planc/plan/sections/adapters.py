"""The adapters section -> LoRA on sets of modules; all other parameters are frozen."""

from planc.plan.call_arguments import Arguments, unknown, word
from planc.plan.evaluate import describe
from planc.plan.ir import AdapterRule, Adapters
from planc.plan.overrides import Settings
from planc.plan.program import Program
from planc.plan.rule_conflicts import Claims, Placed, flatten
from planc.plan.scope import Failed, Scope
from planc.plan.sections.lora_arguments import Lora, lora
from planc.plan.selectors import select
from planc.syntax import ast

ACTIONS = ("lora", "qlora", "none")
_UNITS = {"with_layer": False, "own": True}


def adapters(program: Program) -> Adapters | None:
    """The adapters section of a plan, or None where there is none or it adapts no module."""
    sections = list(program.named("adapters"))
    if not sections:
        return None
    claims: Claims[Lora | None] = Claims(program.sink)
    settings = Settings(program.sink)
    for section in sections:
        if section.axes or section.replicate:
            program.sink.error(
                "PL305",
                "an `adapters` section works over no axis",
                (section.axes or section.replicate)[0].origin,
                help="write `adapters {`: the styles of adapters follow those of their layers",
            )
        for placed in flatten(section, program.scope):
            _item(placed, claims, settings, program)
    rules = tuple(
        AdapterRule(modules=c.modules, adapt=c.value[0], quantize=c.value[1], origin=c.origin)
        for c in claims.claims
        if c.value is not None
    )
    own = settings.lines.get("units")
    return Adapters(
        rules=rules,
        own=settings.values.get("units") or False,
        seed=settings.values.get("seed") or 0,
        units_origin=own.origin if own else None,
        origin=sections[0].name_origin,
    )


def _item(
    placed: Placed, claims: Claims[Lora | None], settings: Settings, program: Program
) -> None:
    item = placed.item
    match item:
        case ast.Rule() if isinstance(item.target, ast.Selector):
            _rule(item, placed, claims, program)
        case ast.Setting() if item.name in ("units", "seed"):
            settings.add(item, lambda item: _value(item, program.scope))
        case ast.Setting():
            message = f"`{item.name}` has no place in an `adapters` section"
            program.sink.error("PL011", message, item.origin, help="it can set `units` and `seed`")
        case _:
            message = "this has no place in an `adapters` section"
            rule = "model.layers.*.self_attn.q_proj : lora(rank = 16)"
            help = f"it holds rules, `{rule}`, and `units = own`"
            program.sink.error("PL011", message, item.origin, help=help)


def _rule(rule: ast.Rule, placed: Placed, claims: Claims[Lora | None], program: Program) -> None:
    scope = program.scope
    assert isinstance(rule.target, ast.Selector)
    if rule.action.name not in ACTIONS:
        unknown(rule.action, ACTIONS, "adapter", scope)
        return
    nothing = rule.action.name == "none"
    value = None if nothing else lora(rule.action, rule.origin, scope)
    right = Arguments(rule.action, scope).done() if nothing else value is not None
    found = select(rule.target, placed.bases, scope, optional=rule.optional)  # report both findings
    if right:
        claims.add(found, "adapters", value, rule.origin, override=rule.override)


def _value(item: ast.Setting, scope: Scope) -> bool | int | None:
    """Whether A and B are units (`units = own`), or the seed (`seed = 1`); None after a finding."""
    value = word(item.value, scope)
    if item.name == "units" and isinstance(value, str) and value in _UNITS:
        return _UNITS[value]
    if item.name == "seed" and type(value) is int and 0 <= value < 2**32:
        return value
    if not isinstance(value, Failed):
        wanted = "`with_layer` or `own`" if item.name == "units" else "an integer of 32 bits"
        shown = f"`{value}`" if isinstance(value, str) else describe(value)
        scope.sink.error("PL012", f"`{item.name}` is {wanted}, not {shown}", item.value.origin)
    return None
