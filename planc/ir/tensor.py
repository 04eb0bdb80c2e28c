"""Tensor sections -> styles on modules; checkpoint and compile sections, which are alike."""

from __future__ import annotations

from collections.abc import Iterator

from planc.ir.arguments import Arguments, unknown
from planc.ir.claims import Claims, Placed, flatten
from planc.ir.evaluate import evaluate
from planc.ir.plan import CheckpointRule, CompileRule, TensorRule
from planc.ir.program import Program
from planc.ir.scope import Scope
from planc.ir.select import select
from planc.ir.style import (
    Change,
    Colwise,
    Input,
    Layout,
    Output,
    Partial,
    Replicate,
    Rowwise,
    Sequence,
    Shard,
    Style,
)
from planc.model.facts import Modules
from planc.syntax import tree

STYLES = ("colwise", "rowwise", "sequence", "input", "output")
_ASPECTS = {"input": "input", "output": "output"}


def tensor(program: Program) -> Iterator[TensorRule]:
    """What the tensor sections decide, in the plan's order."""
    scope = program.scope
    claims: dict[str, Claims[Style]] = {}
    for section in program.named("tensor"):
        axis = _axis(section, program)
        for placed in flatten(section, scope):
            rule = rule_of(placed, "tensor", program)
            if rule is None:
                continue
            if rule.action.name not in STYLES:
                unknown(rule.action, STYLES, "style", scope)
                continue
            found = modules_of(rule, placed, scope)
            if axis and found:
                held = claims.setdefault(axis, Claims(program.sink))
                _claim(rule, found, held, scope)
    for axis, held in claims.items():
        for claim in held.claims:
            yield TensorRule(
                modules=claim.modules, axis=axis, style=claim.value, origin=claim.origin
            )


def _claim(
    rule: tree.Rule, found: tuple[Modules, ...], claims: Claims[Style], scope: Scope
) -> None:
    """One style may mean two things: on an embedding, a bare rowwise takes whole ids."""
    aspect = _ASPECTS.get(rule.action.name, "style")
    by_kind: dict[bool, list[Modules]] = {}
    for modules in found:
        by_kind.setdefault(modules.module.kind == "embedding", []).append(modules)
    sets = list(by_kind.items())
    for i, (embedding, group) in enumerate(sets):
        style = style_of(rule.action, scope, embedding=embedding)
        if style is None:
            return
        override = rule.override and i == 0
        claims.add(group, aspect, style, rule.origin, override=override)


def rule_of(placed: Placed, section: str, program: Program) -> tree.Rule | None:
    """The item as a rule with a selector; anything else is out of place (PL011)."""
    item = placed.item
    if isinstance(item, tree.Rule) and isinstance(item.target, tree.Selector):
        return item
    example = {"tensor": "colwise", "checkpoint": "full", "compile": "block", "train": "frozen"}[
        section
    ]
    program.sink.error(
        "PL011",
        f"this has no place in a `{section}` section",
        item.origin,
        help=f"it holds rules: `model.layers.* : {example}`",
    )
    return None


def modules_of(rule: tree.Rule, placed: Placed, scope: Scope) -> tuple[Modules, ...]:
    assert isinstance(rule.target, tree.Selector)
    return select(rule.target, placed.bases, scope, optional=rule.optional)


def _axis(section: tree.Section, program: Program) -> str | None:
    """The one axis of a tensor section."""
    if section.replicate or len(section.axes) != 1:
        program.sink.error(
            "PL305",
            "a tensor section works over one axis of the mesh",
            section.name_origin,
            help="write `tensor on tp {`",
        )
        return None
    return section.axes[0].path


def style_of(call: tree.Call, scope: Scope, *, embedding: bool = False) -> Style | None:
    """A style as the IR has it, or None after a finding.

    Args:
        call: its name is one of STYLES.
        embedding: whether it stands on an embedding, whose bare rowwise is replicate -> replicate.
    """
    match call.name:
        case "colwise" | "rowwise":
            return _weighted(call, scope, embedding)
        case "sequence":
            arguments = Arguments(call, scope, ("dim", "local"))
            dim = arguments.integer("dim", 1)
            local = arguments.truth("local", False)
            return Sequence(dim=dim, local=local) if arguments.done() else None
        case "input":
            return _input(call, scope)
        case _:
            return _output(call, scope)


def _weighted(call: tree.Call, scope: Scope, embedding: bool) -> Colwise | Rowwise | None:
    arguments = Arguments(call, scope, ("local",))
    local = arguments.truth("local", True)
    default = Colwise() if call.name == "colwise" else Rowwise()
    source = default.input
    target = default.output
    if isinstance(default, Rowwise) and embedding:
        source = Replicate()
    if arguments.positional:
        arrow = arguments.positional[0].value
        if not isinstance(arrow, tree.Arrow):
            told = f"write `{call.name}(-> replicate)`, or `{call.name}(shard(1) -> replicate)`"
            arguments.wrong(arrow, f"`{call.name}` takes an arrow between two layouts", told)
            return None
        one = _layout(arrow.source, arguments) if arrow.source else source
        two = _layout(arrow.target, arguments)
        if one is None or two is None:
            return None
        source, target = one, two
    if not arguments.done(positional=1):
        return None
    return type(default)(input=source, output=target, local=local)


def _layout(expression: tree.Expr, arguments: Arguments) -> Layout | None:
    match expression:
        case tree.Name(path="replicate"):
            return Replicate()
        case tree.Name(path="partial"):
            return Partial()
        case tree.Call(name="shard") if len(expression.arguments) == 1:
            dim = evaluate(expression.arguments[0].value, arguments.scope)
            if isinstance(dim, int) and not isinstance(dim, bool):
                return Shard(dim)
    arguments.wrong(
        expression,
        f"`{expression.origin.text}` is no layout",
        "a layout is `replicate`, `shard(1)` or `partial`",
    )
    return None


def _change(expression: tree.Expr, arguments: Arguments) -> Change | None:
    if not isinstance(expression, tree.Arrow) or expression.source is None:
        told = "write what arrives and what is wanted: `shard(1) -> replicate`"
        arguments.wrong(expression, f"`{expression.origin.text}` is no change of layout", told)
        return None
    source = _layout(expression.source, arguments)
    target = _layout(expression.target, arguments)
    return Change(source, target) if source is not None and target is not None else None


def _positional(arguments: Arguments) -> tuple[Change | None, ...]:
    result: list[Change | None] = []
    for argument in arguments.positional:
        null = isinstance(argument.value, tree.Literal) and argument.value.value is None
        result.append(None if null else _change(argument.value, arguments))
    return tuple(result)


def _input(call: tree.Call, scope: Scope) -> Input | None:
    arguments = Arguments(call, scope)
    local = arguments.truth("local", False)
    positional = _positional(arguments)
    named = [(str(a.name), _change(a.value, arguments)) for a in arguments.rest()]
    changes = tuple((name, change) for name, change in named if change is not None)
    if not any(positional) and not changes and arguments.ok:
        arguments.wrong(call, "`input` changes nothing", "write `input(shard(1) -> replicate)`")
    if not arguments.ok:
        return None
    return Input(positional=positional, named=changes, local=local)


def _output(call: tree.Call, scope: Scope) -> Output | None:
    arguments = Arguments(call, scope, ("local",))
    local = arguments.truth("local", True)
    positional = _positional(arguments)
    if not any(positional) and arguments.ok:
        arguments.wrong(call, "`output` changes nothing", "write `output(shard(1) -> replicate)`")
    if not arguments.done(positional=len(arguments.positional)):
        return None
    return Output(positional=positional, local=local)


# Checkpoint and compile ------------------------------------------------------------------------


def checkpoint(program: Program) -> Iterator[CheckpointRule]:
    claims: Claims[bool] = Claims(program.sink)
    for section in program.named("checkpoint"):
        no_axes(section, program)
        for placed in flatten(section, program.scope):
            rule = rule_of(placed, "checkpoint", program)
            if rule is None:
                continue
            if rule.action.name in ("ops", "offload", "save"):
                program.sink.error(
                    "PL010",
                    f"checkpointing by `{rule.action.name}` is not supported yet",
                    rule.action.origin,
                    help="`full` recomputes the whole module",
                )
            elif rule.action.name not in ("full", "none"):
                unknown(rule.action, ("full", "none"), "way to checkpoint", program.scope)
            elif Arguments(rule.action, program.scope).done():
                found = modules_of(rule, placed, program.scope)
                full = rule.action.name == "full"
                claims.add(found, "checkpoint", full, rule.origin, override=rule.override)
    for claim in claims.claims:
        if claim.value:
            yield CheckpointRule(modules=claim.modules, origin=claim.origin)


def compile_rules(program: Program) -> Iterator[CompileRule]:
    claims: Claims[bool] = Claims(program.sink)
    for section in program.named("compile"):
        no_axes(section, program)
        for placed in flatten(section, program.scope):
            rule = rule_of(placed, "compile", program)
            if rule is None:
                continue
            if rule.action.name != "block":
                unknown(rule.action, ("block",), "way to compile", program.scope)
                continue
            arguments = Arguments(rule.action, program.scope, ("fullgraph",))
            fullgraph = arguments.truth("fullgraph", False)
            if arguments.done():
                found = modules_of(rule, placed, program.scope)
                claims.add(found, "compile", fullgraph, rule.origin, override=rule.override)
    for claim in claims.claims:
        yield CompileRule(modules=claim.modules, fullgraph=claim.value, origin=claim.origin)


def no_axes(section: tree.Section, program: Program) -> None:
    if section.axes or section.replicate:
        program.sink.error(
            "PL305",
            f"a `{section.name}` section works over no axis",
            (section.axes or section.replicate)[0].origin,
            help=f"write `{section.name} {{`",
        )
