"""Expressions -> values. Evaluation is total: no loops, no external calls; a mistake is PL109."""

import operator
import re
from collections.abc import Callable
from typing import Any, TypeGuard, assert_never

from planc.elaborate.scope import FAILED, Failed, Scope, Value
from planc.elaborate.settings import AUTO
from planc.ops.base import cut
from planc.syntax import ast

_LARGEST = 2**63
"""The bound of calculations. No size of a model or a mesh reaches it, and larger numbers of a
stranger's plan would take all memory."""
_MOST_ENTRIES = 10_000
"""The most entries of a list in a plan, with those of the lists in it."""


def evaluate(expression: ast.Expr, scope: Scope) -> Value:
    """The value of an expression, or FAILED after a finding at the invalid part."""
    match expression:
        case ast.Literal():
            return expression.value
        case ast.Name():
            return scope.value(expression)
        case ast.Selector():
            return _select_entry(expression, scope)
        case ast.List():
            values = tuple(evaluate(item, scope) for item in expression.items)
            if any(isinstance(v, Failed) for v in values):
                return FAILED
            if _entries(values) > _MOST_ENTRIES:
                return _wrong(expression, f"a list has at most {_MOST_ENTRIES:,} entries", scope)
            return values
        case ast.Unary():
            return _unary(expression, scope)
        case ast.Binary():
            return _binary(expression, scope)
        case ast.Choice():
            condition = truth(expression.condition, scope)
            if condition is None:
                return FAILED
            return evaluate(expression.then if condition else expression.otherwise, scope)
        case ast.Call():
            return _call(expression, scope)
        case ast.Arrow():
            return _wrong(expression, "`->` changes a layout; it has no value here", scope)
        case _:
            assert_never(expression)


def size(expression: ast.Expr, scope: Scope) -> Value:
    """The value of an argument that counts features, heads or ranks.

    If a plan is elaborated for a proxy model, its expression has the numbers of the proxy model.
    """
    value = evaluate(expression, scope)
    numbers = value if isinstance(value, tuple) else (value,)
    if scope.sized is None or not all(number(n) for n in numbers):
        return value
    return evaluate(expression, scope.sized)


def truth(expression: ast.Expr, scope: Scope) -> bool | None:
    """The value of a condition, or None after a finding."""
    value = evaluate(expression, scope.decides or scope)
    if isinstance(value, bool):
        return value
    if value == AUTO:
        return True
    if not isinstance(value, Failed):
        _wrong(expression, f"a condition is true or false, not {describe(value)}", scope)
    return None


def describe(value: Value) -> str:
    """A value as a message quotes it."""
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case str():
            return f'"{cut(value)}"'
        case tuple():
            inner = ", ".join(describe(v) for v in value[:8])
            return f"[{inner}{', ...' if len(value) > 8 else ''}]"
        case ast.Selector():
            paths = (part.path for part in value.parts or (value,))
            return f"the modules {', '.join(f'`{path}`' for path in paths)}"
        case _:
            return str(value)


def _wrong(node: ast.Node, message: str, scope: Scope, help: str | None = None) -> Failed:
    scope.sink.error("PL109", message, node.origin, help=help)
    return FAILED


def _entries(values: tuple[Value, ...]) -> int:
    """The entries of a list and of the lists in it; no more than one too many are counted."""
    count = 0
    for value in values:
        count += 1 + (_entries(value) if isinstance(value, tuple) else 0)
        if count > _MOST_ENTRIES:
            break
    return count


def number(value: Value) -> TypeGuard[int | float]:
    """Whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: Value) -> TypeGuard[int]:
    """Whether a value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def _unary(node: ast.Unary, scope: Scope) -> Value:
    if node.op == "not":
        inside = truth(node.operand, scope)
        return FAILED if inside is None else not inside
    value = evaluate(node.operand, scope)
    if isinstance(value, Failed):
        return FAILED
    if number(value):
        return -value
    return _wrong(node, f"`-` takes a number, not {describe(value)}", scope)


def _binary(node: ast.Binary, scope: Scope) -> Value:
    if node.op in ("and", "or"):
        left = truth(node.left, scope)
        if left is None:
            return FAILED
        if left is (node.op == "or"):
            return left
        right = truth(node.right, scope)
        return FAILED if right is None else right
    first, second = evaluate(node.left, scope), evaluate(node.right, scope)
    if isinstance(first, Failed) or isinstance(second, Failed):
        return FAILED
    if isinstance(first, ast.Selector) or isinstance(second, ast.Selector):
        return _wrong(node, "modules cannot be compared or used in arithmetic", scope)
    match node.op:
        case "==" | "!=":
            same = first == second and isinstance(first, bool) == isinstance(second, bool)
            return same is (node.op == "==")
        case "in":
            return _contains(node, first, second, scope)
        case _:
            return _arithmetic(node, first, second, scope)


def _contains(node: ast.Binary, left: Value, right: Value, scope: Scope) -> Value:
    if isinstance(right, tuple):
        return left in right
    if isinstance(right, str) and isinstance(left, str):
        return left in right
    return _wrong(node.right, f"`in` takes a list, not {describe(right)}", scope)


def _arithmetic(node: ast.Binary, left: Value, right: Value, scope: Scope) -> Value:
    if not (number(left) and number(right)):
        bad, side = (left, node.left) if not number(left) else (right, node.right)
        hint = None
        if bad is None and isinstance(side, ast.Name):
            hint = f"`{side.path}` is null for this model; test it first: `{side.path} != null`"
        return _wrong(side, f"`{node.op}` takes numbers, not {describe(bad)}", scope, hint)
    assert isinstance(left, int | float) and isinstance(right, int | float)
    if node.op in ("/", "//", "%") and right == 0:
        return _wrong(node.right, f"`{node.op}` by zero", scope)
    try:
        value = _OPERATORS[node.op](left, right)
    except OverflowError:
        return _wrong(node, "the numbers are too large", scope)
    if not isinstance(value, bool) and not -_LARGEST < value < _LARGEST:
        return _wrong(node, "the numbers are too large", scope, "a result has at most 64 bits")
    return value


def _divide(left: int | float, right: int | float) -> int | float:
    """A quotient; of integers that divide evenly an integer."""
    exact = isinstance(left, int) and isinstance(right, int) and left % right == 0
    return left // right if exact else left / right


_OPERATORS: dict[str, Callable[[Any, Any], int | float | bool]] = {
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"+": operator.add, "-": operator.sub, "*": operator.mul},
    **{"//": operator.floordiv, "%": operator.mod, "/": _divide},
}


def _call(node: ast.Call, scope: Scope) -> Value:
    if node.name not in ("min", "max", "len"):
        hint = "an expression can call `min`, `max` and `len`"
        return _wrong(node, f"there is no function `{node.name}`", scope, hint)
    values = []
    for argument in node.arguments:
        if argument.name is not None:
            return _wrong(argument, f"`{node.name}` takes no named arguments", scope)
        values.append(evaluate(argument.value, scope))
    if any(isinstance(v, Failed) for v in values):
        return FAILED
    if len(values) == 1 and isinstance(values[0], tuple) and node.name != "len":
        values = list(values[0])
    if node.name == "len":
        if len(values) == 1 and isinstance(values[0], tuple | str):
            return len(values[0])
        return _wrong(node, "`len` takes one list", scope)
    numbers = [v for v in values if number(v)]
    if not numbers or len(numbers) != len(values):
        return _wrong(node, f"`{node.name}` takes numbers", scope)
    return min(numbers) if node.name == "min" else max(numbers)


def _select_entry(node: ast.Selector, scope: Scope) -> Value:
    """`config.layer_types[0]`: the one pattern that has a value."""
    match = re.fullmatch(r"(config(?:\.\w+)+)\[(-?\d+)\]", node.path)
    if not match or node.cls or node.has:
        return _wrong(node, f"`{node.path}` names modules, which have no value here", scope)
    value = scope.value(ast.Name(origin=node.origin, path=match[1]))
    if isinstance(value, Failed):
        return FAILED
    index = int(match[2]) if len(match[2]) < 1_000 else _LARGEST
    if not isinstance(value, tuple):
        return _wrong(node, f"`{match[1]}` is {describe(value)}, not a list", scope)
    if not -len(value) <= index < len(value):
        return _wrong(node, f"`{match[1]}` has {len(value)} entries", scope)
    picked: Value = value[index]
    return picked
