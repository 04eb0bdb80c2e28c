"""The styles of a tensor section, with their arguments; transformers' names in terms of these."""

import re
from typing import get_args

from planc.elaborate.call_arguments import Arguments, plain_arguments
from planc.elaborate.evaluate import evaluate, size
from planc.elaborate.scope import Failed, Scope
from planc.ops import styles as ir
from planc.ops.base import kind_of
from planc.syntax import ast

_EXPERTS = "experts(gate_up_proj = shard(1, parts = 2), down_proj = shard(2))"
_EXPERT_PARALLEL = "`dispatch(all_to_all)` in a section `expert on ep`; over a tensor axis it is"

_STYLES = {
    "colwise_rep": "`colwise(-> replicate)`",
    "colwise_gather_output": "`colwise(-> replicate)`",
    "rowwise_rep": "`rowwise(replicate -> replicate)`",
    "rowwise_split_input": "`rowwise(replicate -> replicate)`",
    "embedding_rowwise": "`rowwise`",
    "embedding_colwise": "`colwise(-> replicate)`",
    "local_colwise": "`colwise`",
    "local_rowwise": "`rowwise`",
    "packed_colwise": f"`colwise(parts = 2)`; of fused experts `{_EXPERTS}`",
    "packed_rowwise": "`rowwise(parts = 2)`",
    "local_packed_rowwise": "`rowwise(parts = 2)`",
    "sequence_parallel": "`sequence(local = true)`",
    "gather": "`output(partial -> replicate)`",
    "all_reduce": "`output(partial -> replicate)`",
    "replicated_with_grad_allreduce": "`replicate(gradient = sum)`",
    "mla_kv_a_proj": "`mla_kv(rope = config.qk_rope_head_dim)`",
    "moe_tp_experts": f"`{_EXPERTS}`",
    "moe_experts_allreduce": f"`{_EXPERTS}`",
    "moe_identity_expert": 'a style of your own: `style NAME = python "package.module:Class"`',
    "local": "`parameters(weight = shard(0))`, with the names and dims of its parameters",
    "local_params": "`parameters(sinks = shard(0))`, with the names of its parameters",
    "grouped_gemm": f"{_EXPERT_PARALLEL} `{_EXPERTS}`",
    "ep_dispatch_experts": f"{_EXPERT_PARALLEL} `{_EXPERTS}`",
    "ep_router": f"{_EXPERT_PARALLEL} `replicate`",
}
"""Source: `ALL_PARALLEL_STYLES` of transformers 4.50 to 5. `colwise`, `rowwise` and `replicate`
have the same name in both languages."""


def equivalent(name: str) -> str | None:
    """The help for a style of transformers: what a plan writes in its place; None for any other."""
    plain = _STYLES.get(name)
    return f"`{name}` of transformers is, in a plan, {plain}" if plain else None


def style_of_torch(call: ast.Call) -> str | None:
    """The help for a class of torch with its layouts, as `ColwiseParallel(output_layouts =
    Replicate())`: what a plan writes in its place; None for any other, or without arguments.
    """
    name = {"ColwiseParallel": "colwise", "RowwiseParallel": "rowwise"}.get(
        call.name.rpartition(".")[2]
    )
    given = {str(a.name): a.value.origin.text for a in call.arguments}
    if not name or not given or not given.keys() <= _TORCH.keys():
        return None
    source, target = (_layout_of_torch(given.get(f"{end}_layouts")) for end in ("input", "output"))
    arrow = f"{source + ' ' if source else ''}-> {target or _TARGETS[name]}"
    kept = given.get("use_local_output", "").lower() == "false"
    inside = ", ".join([arrow] * bool(source or target) + ["local = false"] * kept)
    return f"`{call.origin.text}` is, in a plan, `{name}{f'({inside})' if inside else ''}`"


_TORCH = dict.fromkeys(("input_layouts", "output_layouts", "use_local_output"))
_TARGETS = {"colwise": "shard(-1)", "rowwise": "replicate"}
"""The default output layouts of torch's styles."""


def _layout_of_torch(written: str | None) -> str:
    return re.sub(r"(?:\w+\.)*(\w+)", lambda m: m[1].lower(), written or "").removesuffix("()")


def split_of_transformers(name: str) -> str | None:
    """The split of weights by a style of transformers, as a plan writes it. Layouts are left out,
    except that all of an output is needed. Empty if it splits no weight, and None if no style of a
    plan has its meaning.
    """
    same = name in ("colwise", "rowwise", "replicate")
    style = re.match(r"`([^`]*)`(;|$)", f"`{name}`" if same else _STYLES.get(name, ""))
    if style is None or style[1] == _EXPERTS:
        return style and style[1]
    match = re.fullmatch(r"(colwise|rowwise)(?:\((.*)\))?", style[1])
    if match is None:
        return ""
    wanted = ("parts = 2", "-> replicate" if match[1] == "colwise" else "")
    kept = [a for a in (match[2] or "").split(", ") if a and a in wanted]
    return f"{match[1]}({', '.join(kept)})" if kept else match[1]


STYLES = tuple(kind_of(cls) for cls in get_args(get_args(ir.Style)[0]) if cls is not ir.Custom)


def style_of(call: ast.Call, scope: Scope, *, kind: str = "other") -> ir.Style | None:
    """A style of the IR, or None after a finding. On an `embedding` bare rowwise is replicate ->
    replicate; the weight of a `conv1d` is transposed.
    """
    match call.name:
        case "colwise" | "rowwise":
            return _weight_style(call, scope, kind)
        case "sequence":
            arguments = Arguments(call, scope, ("dim", "local"))
            dim = arguments.integer("dim", 1)
            local = arguments.truth("local", False)
            return ir.Sequence(dim=dim, local=local) if arguments.done() else None
        case "input":
            return _input(call, scope)
        case "output":
            return _output(call, scope)
        case "replicate":
            arguments = Arguments(call, scope, ("gradient",))
            summed = arguments.word("gradient", {"sum": True}, False)
            return ir.Replicated(summed=summed) if arguments.done() else None
        case "mla_kv":
            return _mla_kv(call, scope)
        case "features":
            return ir.Features() if Arguments(call, scope).done() else None
        case "attributes":
            return _attributes(call, scope)
        case _:
            return _bare(call, scope)


def _weight_style(call: ast.Call, scope: Scope, kind: str) -> ir.Colwise | ir.Rowwise | None:
    arguments = Arguments(call, scope, ("local", "parts", "interleaved"))
    local = arguments.truth("local", True)
    parts, interleaved = parts_of(arguments)
    default = ir.Colwise() if call.name == "colwise" else ir.Rowwise()
    source, target = default.input, default.output
    if isinstance(default, ir.Rowwise) and kind == "embedding":
        source = ir.Replicate()
    if arguments.positional:
        hint = f"write `{call.name}(-> replicate)`, or `{call.name}(shard(1) -> replicate)`"
        arrow = _arrow(arguments, 0, source, hint)
        if arrow is None:
            return None
        source, target = arrow.source, arrow.target
    if not arguments.done(positional=1):
        return None
    return type(default)(
        input=source,
        output=target,
        local=local,
        parts=parts,
        interleaved=interleaved,
        transposed=kind == "conv1d",
    )


def _arrow(arguments: Arguments, at: int, source: ir.Layout, hint: str) -> ir.Redistribution | None:
    """A positional arrow, whose left side may be omitted."""
    arrow = arguments.positional[at].value
    if not isinstance(arrow, ast.Arrow):
        name = arguments.call.name
        arguments.wrong(arrow, f"`{name}` takes an arrow between two layouts", hint)
        return None
    before = _layout(arrow.source, arguments) if arrow.source else source
    after = _layout(arrow.target, arguments)
    return None if before is None or after is None else ir.Redistribution(before, after)


def parts_of(arguments: Arguments) -> tuple[ir.Parts, bool]:
    """`parts = 2` or `parts = [a, b]`, and `interleaved = true`."""
    interleaved = arguments.truth("interleaved", False)
    expression = arguments.take("parts")
    if expression is None:
        if interleaved:
            arguments.wrong(
                arguments.call,
                "`interleaved` has no effect without `parts`",
                "write how many projections alternate: `parts = 2, interleaved = true`",
            )
        return 1, False
    value = size(expression, arguments.scope)
    sizes = value if isinstance(value, tuple) else (value,)
    good = [s for s in sizes if isinstance(s, int) and not isinstance(s, bool) and s > 0]
    if any(isinstance(s, Failed) for s in sizes):
        arguments.ok = False
        return 1, False
    if len(good) < len(sizes) or not good or (interleaved and isinstance(value, tuple)):
        if interleaved:
            what, hint = "how many parts alternate, a positive integer", "write `parts = 2`"
        else:
            what = "a number of equal parts, or a list of positive integers"
            hint = "write `parts = 2`, or the size of each: `parts = [4096, 1024, 1024]`"
        arguments.wrong(expression, f"`parts` is {what}", hint)
        return 1, False
    return (tuple(good) if isinstance(value, tuple) else good[0]), interleaved


def _layout(expression: ast.Expr, arguments: Arguments) -> ir.Layout | None:
    match expression:
        case ast.Name(path="replicate"):
            return ir.Replicate()
        case ast.Name(path="partial"):
            return ir.Partial()
        case ast.Call(name="shard") if len(expression.arguments) == 1:
            dim = evaluate(expression.arguments[0].value, arguments.scope)
            if isinstance(dim, int) and not isinstance(dim, bool):
                return ir.Shard(dim)
    arguments.wrong(
        expression,
        f"`{expression.origin.text}` is not a layout",
        "a layout is `replicate`, `shard(1)` or `partial`",
    )
    return None


def _change(expression: ast.Expr, arguments: Arguments) -> ir.Redistribution | None:
    if not isinstance(expression, ast.Arrow) or expression.source is None:
        hint = "write the current and the desired layout: `shard(1) -> replicate`"
        arguments.wrong(expression, f"`{expression.origin.text}` is not a change of layout", hint)
        return None
    source = _layout(expression.source, arguments)
    target = _layout(expression.target, arguments)
    return ir.Redistribution(source, target) if source is not None and target is not None else None


def _positional(arguments: Arguments) -> tuple[ir.Redistribution | None, ...]:
    result: list[ir.Redistribution | None] = []
    for argument in arguments.positional:
        null = isinstance(argument.value, ast.Literal) and argument.value.value is None
        result.append(None if null else _change(argument.value, arguments))
    return tuple(result)


def _input(call: ast.Call, scope: Scope) -> ir.Input | None:
    arguments = Arguments(call, scope)
    local = arguments.truth("local", False)
    positional = _positional(arguments)
    named = [(str(a.name), _change(a.value, arguments)) for a in arguments.remaining()]
    changes = tuple((name, change) for name, change in named if change is not None)
    if not any(positional) and not changes and arguments.ok:
        arguments.wrong(call, "`input` changes nothing", "write `input(shard(1) -> replicate)`")
    if not arguments.ok:
        return None
    return ir.Input(positional=positional, named=changes, local=local)


def _output(call: ast.Call, scope: Scope) -> ir.Output | None:
    arguments = Arguments(call, scope, ("local",))
    local = arguments.truth("local", True)
    positional = _positional(arguments)
    if not any(positional) and arguments.ok:
        arguments.wrong(call, "`output` changes nothing", "write `output(shard(1) -> replicate)`")
    if not arguments.done(positional=len(arguments.positional)):
        return None
    return ir.Output(positional=positional, local=local)


def custom(call: ast.Call, path: str, scope: Scope) -> ir.Custom | None:
    """A style of the plan's own, with any arguments."""
    arguments = Arguments(call, scope)
    given = plain_arguments(arguments)
    return ir.Custom(name=call.name, path=path, arguments=given) if arguments.done() else None


def _mla_kv(call: ast.Call, scope: Scope) -> ir.MlaKv | None:
    arguments = Arguments(call, scope, ("rope",))
    rope = arguments.integer("rope", 0, size)
    if rope < 1 and arguments.ok:
        hint = "write `mla_kv(rope = config.qk_rope_head_dim)`"
        arguments.wrong(call, "`mla_kv` needs the number of rotary features", hint)
    return ir.MlaKv(rope=rope) if arguments.done() else None


def _attributes(call: ast.Call, scope: Scope) -> ir.Attributes | None:
    """`attributes(heads = split)`."""
    names = tuple(dict.fromkeys(str(a.name) for a in call.arguments if a.name is not None))
    arguments = Arguments(call, scope, names)
    for name in names:
        arguments.word(name, {"split": True}, True)
    if not names and arguments.ok:
        hint = "name the attributes that count heads: `attributes(heads = split)`"
        arguments.wrong(call, "`attributes` names no attribute", hint)
    return ir.Attributes(names=names) if arguments.done() else None


# Bare parameters ---------------------------------------------------------------------------------


def _bare(call: ast.Call, scope: Scope) -> ir.Parameters | ir.Experts | None:
    """`parameters(sinks = shard(0))`, `experts(up = shard(1, parts = 2), down = shard(2))`."""
    arguments = Arguments(call, scope)
    flow = ir.Redistribution(ir.Replicate(), ir.Replicate())
    experts = call.name == "experts"
    local = arguments.truth("local", True) if experts else True
    if arguments.positional and experts:
        hint = "write `experts(down_proj = shard(2), -> shard(1))`"
        arrow = _arrow(arguments, 0, flow.source, hint)
        if arrow is None:
            return None
        flow = arrow
    named = [(str(a.name), _parameter_layout(a.value, arguments)) for a in arguments.remaining()]
    layouts = tuple((name, layout) for name, layout in named if layout is not None)
    if not named and arguments.ok:
        hint = f"name its parameters: `{call.name}(weight = shard(0))`"
        arguments.wrong(call, f"`{call.name}` names no parameter", hint)
    if not arguments.done(positional=int(experts)):
        return None
    if experts:
        return ir.Experts(layouts=layouts, input=flow.source, output=flow.target, local=local)
    return ir.Parameters(layouts=layouts)


def _parameter_layout(expression: ast.Expr, arguments: Arguments) -> ir.ParameterLayout | None:
    """`shard(1)`, `shard(1, parts = 2, interleaved = true)`, `replicate`, `partial`."""
    if not isinstance(expression, ast.Call) or expression.name != "shard":
        layout = _layout(expression, arguments)
        return None if layout is None else ir.ParameterLayout(layout=layout)
    inner = Arguments(expression, arguments.scope, ("parts", "interleaved"))
    parts, interleaved = parts_of(inner)
    dim = evaluate(inner.positional[0].value, inner.scope) if inner.positional else None
    if not isinstance(dim, int) or isinstance(dim, bool):
        inner.wrong(expression, "`shard` names the dim that it splits", "write `shard(1)`")
        arguments.ok = False
        return None
    if not inner.done(positional=1):
        arguments.ok = False
        return None
    return ir.ParameterLayout(layout=ir.Shard(dim), parts=parts, interleaved=interleaved)
