"""The optimizer section -> how the parameters inside modules are stepped."""

from dataclasses import fields
from typing import Any

from planc.elaborate.call_arguments import Arguments, names_class, plain_arguments
from planc.elaborate.evaluate import evaluate
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import Claims
from planc.elaborate.scope import Failed
from planc.elaborate.sections.fsdp_policies import DTYPES
from planc.elaborate.sections.tensor import modules_of, no_axes, rules_of
from planc.elaborate.sections.tensor_styles import parts_of
from planc.ir.nodes import OptimizerRule
from planc.ops.optimizer import Adafactor, AdamW, Muon, Optimize, OptimizerClass, Sgd
from planc.syntax import ast

_ALGORITHMS = {"adamw": AdamW, "sgd": Sgd, "adafactor": Adafactor, "muon": Muon}
_PER = {word: word for word in ("matrix", "part", "head", "expert")}
_STATES = {word: name for word, name in DTYPES.items() if name in ("float32", "bfloat16")}
_FACTOR = ("a number from 0", lambda value: value >= 0)
_BLOCK = 256
"""Numbers of a state in 8 bits that have one scale, as in bitsandbytes and torchao."""
_SHARED = ("lr", "weight_decay", "state", "block", "offload")
_BELOW_ONE = ("a number from 0 to below 1", lambda value: 0 <= value < 1)
_RANGES = {
    "beta2_decay": ("a number up to 0", lambda value: value <= 0),
    "d": ("a number from 1", lambda value: value >= 1),
    **dict.fromkeys(("eps", "eps1", "eps2"), _FACTOR),
}


def optimizer(program: Program) -> tuple[OptimizerRule, ...]:
    """The rules of the optimizer sections, outer modules before those inside them.

    A rule applies to all parameters inside its modules without a rule of their own; `muon` to the
    matrices among them.
    """
    claims: Claims[OptimizerRule | None] = Claims(program.sink)
    for section in program.sections_named("optimizer"):
        no_axes(section, program)
        known = (*_ALGORITHMS, OptimizerClass.KIND)
        for rule, placed in rules_of(section, known, "algorithm", program):
            assert isinstance(rule.target, ast.Selector)
            whole = rule.target.path == "root" and not placed.nested
            facts = program.facts
            modules = (facts.model,) if whole else modules_of(rule, placed, program.scope)
            read = _rule(rule.action, program)
            if read is not None:
                claims.add(modules, "optimizer", read, rule.origin, override=rule.override)
    return tuple(sorted(claims.rules(), key=lambda rule: len(rule.modules.path)))


def _rule(call: ast.Call, program: Program) -> OptimizerRule | None:
    """An algorithm with its arguments, on the whole model; None after a finding."""
    if call.name == OptimizerClass.KIND:
        return _class(call, program)
    kind = _ALGORITHMS[call.name]
    algorithm_fields = [f.name for f in fields(kind) if f.name != "units"]
    more = ("per", "parts", "interleaved", "anyway") if kind is Muon else ()
    arguments = Arguments(call, program.scope, (*_SHARED, *more, *algorithm_fields))
    values = _terms(kind, arguments)
    per = arguments.word("per", _PER, None) if more else None
    parts, interleaved = parts_of(arguments) if more else (1, False)
    anyway = arguments.truth("anyway", False) if more else False
    op = Optimize(
        modules=program.facts.model,
        algorithm=kind(**values),
        lr=arguments.number("lr", 1.0, *_FACTOR),
        weight_decay=arguments.number("weight_decay", 1.0, *_FACTOR),
        offload=bool(arguments.word("offload", {"states": True, "none": False}, False)),
        **_states(arguments, call),
    )
    if not arguments.done():
        return None
    return OptimizerRule(
        modules=op.modules,
        op=op,
        per=per,
        parts=parts,
        interleaved=interleaved,
        anyway=anyway,
        origin=call.origin,
    )


def _terms(kind: Any, arguments: Arguments) -> dict[str, object]:
    """The arguments of an algorithm's own."""
    values: dict[str, object] = {}
    for f in fields(kind):
        default: Any = f.default
        match f.name:
            case "units":
                values[f.name] = ()
            case "nesterov":
                values[f.name] = arguments.truth(f.name, default)
            case "ns_steps":
                values[f.name] = arguments.integer(f.name, default)
            case "adjust_lr":
                ways = {word: word for word in ("original", "match_rms_adamw")}
                values[f.name] = arguments.word(f.name, ways, default)
            case "compute":
                values[f.name] = arguments.word(f.name, _STATES, default)
            case _:
                values[f.name] = arguments.number(f.name, default, *_RANGES.get(f.name, _BELOW_ONE))
    return values


def _class(call: ast.Call, program: Program) -> OptimizerRule | None:
    """A class with any arguments, which is not imported here: reading a plan runs no code."""
    arguments = Arguments(call, program.scope)
    lr, decay = (arguments.number(name, 1.0, *_FACTOR) for name in ("lr", "weight_decay"))
    path = evaluate(arguments.positional[0].value, program.scope) if arguments.positional else None
    if not isinstance(path, Failed) and not names_class(path):
        said = f'"{path}" names' if isinstance(path, str) else "the rule names"
        help = 'write `class("package.module:Class", betas = [0.9, 0.99])`'
        program.sink.error("PL171", f"{said} no class", call.origin, help=help)
    if arguments.take("state") is not None:
        hint = "its states have the dtype that the class gives them"
        arguments.wrong(call, "`class` takes no argument `state`", hint)
    given = plain_arguments(arguments)
    if not arguments.done(positional=1) or not names_class(path):
        return None
    algorithm = OptimizerClass(path=str(path), arguments=given)
    whole = program.facts.model
    op = Optimize(modules=whole, algorithm=algorithm, lr=lr, weight_decay=decay)
    return OptimizerRule(modules=op.modules, op=op, per=None, parts=1, origin=call.origin)


def _states(arguments: Arguments, call: ast.Call) -> dict[str, Any]:
    """The dtype of states, or the blocks of those in 8 bits."""
    words: dict[str, str] = {**_STATES, "int8": "int8"}
    state = arguments.word("state", words, None)
    block = arguments.integer("block", _BLOCK)
    if block < 1:
        arguments.wrong(call, f"a block has at least one number, not {block}")
    if state != "int8":
        if block != _BLOCK:
            arguments.wrong(call, "`block` is of states in 8 bits", "write `state = int8` too")
        return {"state": state}
    if call.name == Adafactor.KIND:
        hint = "it keeps a number for each row and column of a matrix: less than 8 bits each"
        arguments.wrong(call, "`adafactor` has no states in 8 bits", hint)
    return {"block": max(1, block)}
