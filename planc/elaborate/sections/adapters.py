"""The adapters section -> LoRA on sets of modules; all other parameters are frozen."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planc.diagnostics.source import Span
from planc.elaborate.call_arguments import Arguments, word, wrong_value
from planc.elaborate.evaluate import number, size
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import Settings
from planc.elaborate.scope import FAILED, Failed, Scope, Value
from planc.elaborate.sections.fsdp_policies import DTYPES
from planc.elaborate.sections.tensor import read_claims
from planc.elaborate.sections.word_settings import one_word
from planc.ir.nodes import AdapterRule, Adapters, Fsdp
from planc.ops.compressed_weights import CompressedWeights
from planc.ops.load import Load
from planc.ops.lora import INITS, Adapt
from planc.sections import NAMES, SECTIONS, Hook
from planc.syntax import ast

_ARGUMENTS = ("rank", "alpha", "dropout", "dtype", "init", "rslora", "dora", "parameters")
_DTYPES = {word: name for word, name in DTYPES.items() if name != "float64"}
_SECTION_OF = {word: name for name in NAMES for word in SECTIONS[name].adapters}
"""The sections that have actions, by these."""
ACTIONS = ("lora", *_SECTION_OF, "none")
_READ_COMPRESSION = Hook[Callable[[Arguments, Span], CompressedWeights]](
    "section", "read_compression"
)


def lora(call: ast.Call, origin: Span, scope: Scope) -> AdapterRule | None:
    """`lora(...)`, or a section's action, on the whole model; None after PL012 or PL181."""
    section = _SECTION_OF.get(call.name, "")
    more = SECTIONS[section].adapters[call.name] if section else ()
    arguments = Arguments(call, scope, (*_ARGUMENTS, *more))
    places = {a.name: a.value.origin for a in call.arguments}
    sizes = ("rank", "alpha", "dropout")
    rank, alpha, dropout = (arguments.read(n, None, "a number", number, size) for n in sizes)
    dtype = arguments.word("dtype", _DTYPES, None)
    init = arguments.word("init", {name: name for name in INITS}, "default")
    rslora, parameters = arguments.truth("rslora", False), _parameters(arguments)
    read_compression = _READ_COMPRESSION.find(section)
    compressed = read_compression(arguments, origin) if read_compression else None
    dora = arguments.truth("dora", False)
    if not arguments.done():
        return None
    if dora and compressed:
        message = f"DoRA of {compressed.TITLE} is not supported yet: its norms are of their values"
        hint = "write `lora(..., dora = true)`, or remove `dora`"
        scope.sink.error("PL010", message, places["dora"], help=hint)
        return None
    if rank is None:
        example = f"write `{call.name}(rank = 16, alpha = 32)`"
        arguments.wrong(call, f"`{call.name}` needs a rank", example)
        return None
    given = {"rank": rank, "alpha": alpha, "dropout": dropout}
    if not _in_range(given, compressed, places, scope):
        return None
    assert isinstance(rank, int)
    op = Adapt(
        members=(),
        rank=rank,
        alpha=rank if alpha is None else alpha,
        dropout=dropout or 0.0,
        dtype=dtype,
        init=init,
        rslora=rslora,
        dora=dora,
        parameters=parameters,
        origin=origin,
    )
    return AdapterRule(modules=scope.facts.model, adapt=op, compressed=compressed, origin=origin)


def _in_range(
    given: Mapping[str, Any],
    compressed: CompressedWeights | None,
    places: Mapping[Any, Span],
    scope: Scope,
) -> bool:
    """Whether all numbers can be those of an adapter; PL181 for each that can't."""
    before, (rank, alpha, dropout) = scope.sink.errors, given.values()
    if not isinstance(rank, int) or rank < 1:
        _range(scope, f"the rank of an adapter is a positive integer, not {rank}", places["rank"])
    if alpha is not None and alpha <= 0:
        _range(scope, f"`alpha` is a positive number, not {alpha}", places["alpha"])
    if dropout is not None and not 0 <= dropout < 1:
        text = f"`dropout` is a fraction of the inputs, from 0 to less than 1, not {dropout}"
        _range(scope, text, places["dropout"])
    for argument, text in compressed.range_problems() if compressed else ():
        _range(scope, text, places[argument])
    return scope.sink.errors == before


def _parameters(arguments: Arguments) -> tuple[str, ...]:
    """`gate_up_proj` or `[gate_up_proj, down_proj]`: weights of fused experts; none for all."""

    def read(given: ast.Expr, scope: Scope) -> Value:
        items = given.items if isinstance(given, ast.List) else (given,)
        names = tuple(word(item, scope) for item in items)
        return FAILED if any(isinstance(n, Failed) for n in names) else names

    def valid(value: Value) -> bool:
        if not isinstance(value, tuple) or not all(isinstance(n, str) for n in value):
            return False
        return 0 < len(value) == len(set(value))

    wanted = "a weight of experts, or a list of them"
    return tuple(arguments.read("parameters", (), wanted, valid, read))


def _range(scope: Scope, message: str, origin: Span) -> None:
    scope.sink.error("PL181", message, origin)


_SETTINGS = ("units", "seed")
_UNITS = {"with_layer": False, "own": True}


def adapters(program: Program, load: Load | None, fsdp: Fsdp | None) -> Adapters | None:
    """The adapters section of a plan; None without one. `load` and `fsdp` decide the dtype in which
    compressed weights are stored.
    """
    sections = list(program.sections_named("adapters"))
    if not sections:
        return None
    scope, settings = program.scope, Settings(program.sink)

    def setting(item: ast.Setting) -> bool:
        if item.name in _SETTINGS:
            settings.add(item, lambda item: _value(item, scope))
        return item.name in _SETTINGS

    def read(rule: ast.Rule) -> tuple[AdapterRule | None] | None:
        if rule.action.name == "none":
            return (None,) if Arguments(rule.action, scope).done() else None
        found = lora(rule.action, rule.origin, scope)
        return None if found is None else (found,)

    claims = read_claims(program, "adapters", ACTIONS, "adapter", read, setting=setting)
    own = settings.lines.get("units")
    return Adapters(
        rules=tuple(_with_storage(rule, load, fsdp) for rule in claims.rules()),
        own=settings.values.get("units") or False,
        seed=settings.values.get("seed") or 0,
        units_origin=own.origin if own else None,
        origin=sections[0].name_origin,
    )


def _with_storage(rule: AdapterRule, load: Load | None, fsdp: Fsdp | None) -> AdapterRule:
    """The rule with the dtype in which its compressed weights are stored, by default that in which
    FSDP gathers: FSDP casts parameters of other dtypes, and packed bytes must not be cast.
    """
    if rule.compressed is None or rule.compressed.storage:
        return rule
    dtype = fsdp.precision.param if fsdp and fsdp.precision else None
    if dtype is None and (weight := rule.modules.module.parameter("weight")):
        dtype = load.dtype_after_load(weight) if load else weight.dtype
    return replace(rule, compressed=rule.compressed.with_storage(dtype or "float32"))


def _value(item: ast.Setting, scope: Scope) -> bool | int | None:
    """Whether A and B are units (`units = own`), or the seed (`seed = 1`); None after a finding."""
    if item.name == "units":
        chosen = one_word(item, {name: name for name in _UNITS}, scope)
        return None if chosen is None else _UNITS[chosen]
    value = word(item.value, scope)
    if type(value) is int and 0 <= value < 2**32:
        return value
    wrong_value(item.value, item.name, "an integer of 32 bits", value, scope)
    return None
