"""Finds what is at a place of a plan: in its AST, and in a text that may not parse yet."""

import re
from dataclasses import dataclass

from planc.diagnostics.source import Span
from planc.syntax import ast
from planc.syntax.error_recovery import mask_text

_HEAD = re.compile(
    r"(?:(?:override|optional)\s+)*(?!(?:when|else)\b)([^\s{]\S*?)(?:\s*<(\w+)>)?(?:\s|$)"
)
_TYPED = re.compile(r"(?:[\w.*$]|\{[^{}\s]*\}?|\[[-:,\d]*\]?)*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The place in a plan at which the user types.

    Args:
        section: the name of the enclosing section; empty at the top.
        blocks: the selectors of the enclosing blocks.
        before: the statement up to here.
        typed: the selector or name at its end.
    """

    section: str
    blocks: tuple[ast.Selector, ...]
    before: str
    typed: str


def cursor(text: str, offset: int) -> Cursor:
    """The place of an offset in a text, by the brackets before it."""
    shape, start, depth = mask_text(text[:offset]), 0, 0
    heads: list[re.Match[str] | None] = []
    for bracket in re.finditer(r"[{}()\[\]\n]", shape):
        at, char = bracket.start(), bracket[0]
        block = char == "{" and (at == start or shape[at - 1] in " \t\n)")  # else alternatives
        if char in "([)]":
            depth = max(0, depth + (1 if char in "([" else -1))
        elif char == "{":
            heads.append(_HEAD.match(shape[start:at].strip("} \t")) if block else None)
        elif char == "}":
            block = bool(heads) and heads.pop() is not None
        if block or (char == "\n" and depth == 0):
            start, depth = at + 1, 0
    words, before = [head for head in heads if head], text[start:offset].lstrip()
    typed = _TYPED.search(before)
    return Cursor(
        section=words[0][1] if words else "",
        blocks=tuple(
            ast.Selector(origin=Span.from_place(""), path=w[1].rstrip(","), cls=w[2])
            for w in words[1:]
        ),
        before=before,
        typed=typed[0] if typed else "",
    )


def nodes_at(node: ast.Node, offset: int) -> tuple[ast.Node, ...]:
    """The nodes around an offset, from the outermost."""
    for child in ast.children(node):
        if child.origin.start <= offset <= child.origin.end:
            return (node, *nodes_at(child, offset))
    return (node,)
