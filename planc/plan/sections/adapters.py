"""The adapters section -> LoRA on sets of modules; all other parameters are frozen."""

from __future__ import annotations

from planc.plan.call_arguments import Arguments, unknown, word
from planc.plan.evaluate import describe
from planc.plan.ir import AdapterRule, Adapters
from planc.plan.program import Program
from planc.plan.rule_conflicts import Claims, Placed, flatten
from planc.plan.scope import FAILED, Failed
from planc.plan.sections.lora_arguments import Lora, lora
from planc.plan.selectors import select
from planc.syntax import ast

ACTIONS = ("lora", "qlora", "none")
_UNITS = {"with_layer": False, "own": True}


class _Terms:
    """The section's settings: `units = ...`, `seed = ...`."""

    def __init__(self) -> None:
        self.own = False
        self.seed = 0
        self.said: dict[str, ast.Setting] = {}


def adapters(program: Program) -> Adapters | None:
    """The adapters section of a plan, or None where there is none or it adapts no module."""
    sections = list(program.named("adapters"))
    if not sections:
        return None
    claims: Claims[Lora | None] = Claims(program.sink)
    terms = _Terms()
    for section in sections:
        if section.axes or section.replicate:
            program.sink.error(
                "PL305",
                "an `adapters` section works over no axis",
                (section.axes or section.replicate)[0].origin,
                help="write `adapters {`: the styles of adapters follow those of their layers",
            )
        for placed in flatten(section, program.scope):
            _item(placed, claims, terms, program)
    rules = tuple(
        AdapterRule(modules=claim.modules, origin=claim.origin, **claim.value)
        for claim in claims.claims
        if claim.value is not None
    )
    own = terms.said.get("units")
    return Adapters(
        rules=rules,
        own=terms.own,
        seed=terms.seed,
        units_origin=own.origin if own else None,
        origin=sections[0].name_origin,
    )


def _item(placed: Placed, claims: Claims[Lora | None], terms: _Terms, program: Program) -> None:
    item = placed.item
    match item:
        case ast.Rule() if isinstance(item.target, ast.Selector):
            _rule(item, placed, claims, program)
        case ast.Setting():
            _setting(item, terms, program)
        case _:
            program.sink.error(
                "PL011",
                "this has no place in an `adapters` section",
                item.origin,
                help="it holds rules, `model.layers.*.self_attn.q_proj : lora(rank = 16)`, "
                "and `units = own`",
            )


def _rule(rule: ast.Rule, placed: Placed, claims: Claims[Lora | None], program: Program) -> None:
    scope = program.scope
    assert isinstance(rule.target, ast.Selector)
    if rule.action.name not in ACTIONS:
        unknown(rule.action, ACTIONS, "adapter", scope)
        return
    value, right = None, True
    if rule.action.name == "none":
        right = Arguments(rule.action, scope).done()
    else:
        value = lora(rule.action, scope)
        right = value is not None
    found = select(rule.target, placed.bases, scope, optional=rule.optional)  # both are said
    if right:
        claims.add(found, "adapters", value, rule.origin, override=rule.override)


def _setting(item: ast.Setting, terms: _Terms, program: Program) -> None:
    """`units = own` or `seed = 1`; repeating one needs `override` (PL102, PL103)."""
    sink = program.sink
    if item.name not in ("units", "seed"):
        sink.error(
            "PL011",
            f"`{item.name}` has no place in an `adapters` section",
            item.origin,
            help="it can set `units` and `seed`",
        )
        return
    earlier = terms.said.get(item.name)
    if earlier is not None and not item.override:
        sink.error(
            "PL102",
            f"two lines decide the `{item.name}` of adapters",
            item.origin,
            earlier.origin,
            help="take one away, or write `override` before the one that is to hold",
        )
        return
    if earlier is None and item.override:
        sink.error(
            "PL103",
            f"nothing before this decides `{item.name}`: there is nothing to override",
            item.origin,
            help="take `override` away",
        )
        return
    terms.said[item.name] = item
    value = word(item.value, program.scope)
    if value is FAILED or isinstance(value, Failed):
        return
    if item.name == "units" and isinstance(value, str) and value in _UNITS:
        terms.own = _UNITS[value]
    elif item.name == "seed" and type(value) is int and 0 <= value < 2**32:
        terms.seed = value
    else:
        wanted = "`with_layer` or `own`" if item.name == "units" else "a number of 32 bits"
        shown = f"`{value}`" if isinstance(value, str) else describe(value)
        sink.error("PL012", f"`{item.name}` is {wanted}, not {shown}", item.value.origin)
