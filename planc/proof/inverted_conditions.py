"""Conditions of a plan, each of them inverted: a `when` the wrong way around is one mistake that
changes many rules.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planc.syntax import ast

Files = tuple[ast.File, ...]


def inverted(files: Files) -> Iterator[tuple[ast.When, Files]]:
    """Each `when` of a plan, with the plan in which its condition is negated."""
    for file in files:
        for when in _whens(file):
            yield when, tuple(_negated(other, when) for other in files)


def _whens(node: Any) -> Iterator[ast.When]:
    if isinstance(node, ast.When):
        yield node
    for part in _parts(node).values():
        for child in part:
            yield from _whens(child)


def _negated(node: Any, when: ast.When) -> Any:
    if node is when:
        origin = when.condition.origin
        return replace(when, condition=ast.Unary(op="not", operand=when.condition, origin=origin))
    parts = _parts(node)
    made = {name: tuple(_negated(child, when) for child in part) for name, part in parts.items()}
    return replace(node, **made) if made else node


def _parts(node: Any) -> dict[str, tuple[Any, ...]]:
    """What a file, a section, a block or a `when` contains, by the name of the field."""
    found = {name: getattr(node, name, None) for name in _CONTAIN}
    return {name: part for name, part in found.items() if isinstance(part, tuple)}


_CONTAIN = ("statements", "items", "then", "otherwise")
