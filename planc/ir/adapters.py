"""The adapters section -> LoRA on sets of modules; all else of the model is frozen."""

from __future__ import annotations

from planc.ir.arguments import Arguments, unknown, word
from planc.ir.claims import Claims, Placed, flatten
from planc.ir.evaluate import describe, evaluate
from planc.ir.plan import AdapterRule, Adapters
from planc.ir.program import Program
from planc.ir.scope import FAILED, Failed, Scope
from planc.ir.select import select
from planc.source import Span
from planc.syntax import tree

ACTIONS = ("lora", "none")
INITS = ("default", "gaussian", "random")
_ARGUMENTS = ("rank", "alpha", "dropout", "dtype", "init")
_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
_UNITS = {"with_layer": False, "own": True}


class _Terms:
    """What the section's settings say: `units = ...`, `seed = ...`."""

    def __init__(self) -> None:
        self.own = False
        self.seed = 0
        self.said: dict[str, tree.Setting] = {}


Lora = tuple[int, float, float, str | None, str]


def adapters(program: Program) -> Adapters | None:
    """The adapters section of a plan, or None where it has none (or none that adapts a module)."""
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
        AdapterRule(
            modules=claim.modules,
            rank=claim.value[0],
            alpha=claim.value[1],
            dropout=claim.value[2],
            dtype=claim.value[3],
            init=claim.value[4],
            origin=claim.origin,
        )
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
        case tree.Rule() if isinstance(item.target, tree.Selector):
            _rule(item, placed, claims, program)
        case tree.Setting():
            _setting(item, terms, program)
        case _:
            program.sink.error(
                "PL011",
                "this has no place in an `adapters` section",
                item.origin,
                help="it holds rules, `model.layers.*.self_attn.q_proj : lora(rank = 16)`, "
                "and `units = own`",
            )


def _rule(rule: tree.Rule, placed: Placed, claims: Claims[Lora | None], program: Program) -> None:
    scope = program.scope
    assert isinstance(rule.target, tree.Selector)
    if rule.action.name == "qlora":
        scope.sink.error(
            "PL010",
            "`qlora`, adapters on 4-bit weights, is not supported yet",
            rule.action.origin,
            help="`lora` on weights in bf16",
        )
        return
    if rule.action.name not in ACTIONS:
        unknown(rule.action, ACTIONS, "adapter", scope)
        return
    value = None
    if rule.action.name == "none":
        if not Arguments(rule.action, scope).done():
            return
    else:
        value = _lora(rule.action, scope)
        if value is None:
            return
    found = select(rule.target, placed.bases, scope, optional=rule.optional)
    claims.add(found, "adapters", value, rule.origin, override=rule.override)


def _lora(call: tree.Call, scope: Scope) -> Lora | None:
    """The arguments of `lora(...)`, or None after a finding (PL012, PL181)."""
    arguments = Arguments(call, scope, _ARGUMENTS)
    places = {a.name: a.value.origin for a in call.arguments}
    rank = _number(arguments, "rank")
    alpha = _number(arguments, "alpha")
    dropout = _number(arguments, "dropout")
    dtype = arguments.word("dtype", _DTYPES, None)
    init = arguments.word("init", {name: name for name in INITS}, "default")
    if not arguments.done():
        return None
    if rank is None:
        arguments.wrong(call, "`lora` needs a rank", "write `lora(rank = 16, alpha = 32)`")
        return None
    before = scope.sink.errors
    if not isinstance(rank, int) or rank < 1:
        _range(scope, f"the rank of an adapter is a positive integer, not {rank}", places["rank"])
    if alpha is not None and alpha <= 0:
        _range(scope, f"`alpha` is a positive number, not {alpha}", places["alpha"])
    if dropout is not None and not 0 <= dropout < 1:
        text = f"`dropout` is a share of the inputs, from 0 to less than 1, not {dropout}"
        _range(scope, text, places["dropout"])
    if scope.sink.errors > before:
        return None
    assert isinstance(rank, int)
    return rank, rank if alpha is None else alpha, dropout or 0.0, dtype, init


def _range(scope: Scope, message: str, origin: Span) -> None:
    scope.sink.error("PL181", message, origin)


def _number(arguments: Arguments, name: str) -> int | float | None:
    expression = arguments.take(name)
    if expression is None:
        return None
    value = evaluate(expression, arguments.scope)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    arguments.ok = False
    if not isinstance(value, Failed):
        arguments.wrong(expression, f"`{name}` is a number, not {describe(value)}")
    return None


def _setting(item: tree.Setting, terms: _Terms, program: Program) -> None:
    """`units = own` or `seed = 1`; said twice only with `override` (PL102, PL103)."""
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
