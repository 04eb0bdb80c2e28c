"""Settings of an fsdp section that apply to all its units: precision, prefetch, offload, divide."""

from planc.diagnostics.source import Span
from planc.elaborate.call_arguments import Arguments
from planc.elaborate.evaluate import size
from planc.elaborate.scope import Failed, Scope
from planc.ir.nodes import Offload, Precision
from planc.ops.fsdp import Divide, Prefetch
from planc.ops.phrases import SHORT
from planc.syntax import ast

PRECISION = ("param", "reduce", "output", "cast_inputs")
DTYPES = {short: name for name, short in SHORT.items()} | {name: name for name in SHORT}


def precision(arguments: Arguments, origin: Span) -> Precision | None:
    """The mixed precision policy that arguments give, None where they give none."""
    given = {a.name for a in arguments.call.arguments} & set(PRECISION)
    policy = Precision(
        param=arguments.word("param", DTYPES, None),
        reduce=arguments.word("reduce", DTYPES, None),
        output=arguments.word("output", DTYPES, None),
        cast_inputs=arguments.truth("cast_inputs", True),
        origin=origin,
    )
    return policy if given else None


def section_precision(item: ast.Directive, scope: Scope) -> Precision | None:
    """`precision(param = bf16)`, or None after a finding."""
    arguments = Arguments(item.call, scope, PRECISION)
    policy = precision(arguments, item.origin)
    if arguments.done() and policy is None:
        arguments.wrong(item, "`precision` has no arguments", "write `precision(param = bf16)`")
    return policy if arguments.ok else None


def prefetch(item: ast.Directive, scope: Scope) -> Prefetch | None:
    """`prefetch(forward = 2, backward = 2)` without its units, or None after a finding."""
    arguments = Arguments(item.call, scope, ("forward", "backward"))
    policy = Prefetch(
        units=(),
        forward=_depth("forward", arguments),
        backward=_depth("backward", arguments),
        origin=item.origin,
    )
    if not arguments.done():
        return None
    if not (policy.forward or policy.backward):
        hint = "write `prefetch(forward = 2, backward = 2)`"
        arguments.wrong(item, "`prefetch` has no arguments", hint)
        return None
    return policy


def _depth(name: str, arguments: Arguments) -> int:
    depth = arguments.integer(name, 0)
    if depth < 0:
        arguments.wrong(arguments.call, f"`{name}` is a number of entries ahead, not {depth}")
    return depth


def offload(item: ast.Directive, scope: Scope) -> Offload | None:
    """`offload(cpu, pin = false)`, or None after a finding."""
    arguments = Arguments(item.call, scope, ("cpu", "pin"))
    pin = arguments.truth("pin", True)
    where = arguments.positional[0].value if arguments.positional else None
    if not isinstance(where, ast.Name) or where.path != "cpu":
        hint = "write `offload(cpu)`, or `offload(cpu, pin = false)`"
        arguments.wrong(where or item, "`offload` needs a device: `cpu`", hint)
        return None
    return Offload(pin=pin, origin=item.origin) if arguments.done(positional=1) else None


def divide(item: ast.Setting, scope: Scope) -> Divide | None:
    """`divide = 8`, or None after a finding."""
    factor = size(item.value, scope)
    if isinstance(factor, Failed):
        return None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        message = "`divide` is a positive number"
        help = "gradients are summed over the ranks, then divided by it"
        scope.sink.error("PL012", message, item.value.origin, help=help)
        return None
    return Divide(factor=factor, origin=item.origin)
