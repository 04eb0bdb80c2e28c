"""Parse tree -> AST: one method per grammar rule, each node with its span."""

import re
from collections.abc import Callable
from typing import Any

from lark import Token, Transformer, v_args
from lark.tree import Meta

from planc.source import Source, Span
from planc.syntax import ast

_LARGEST = 2**63
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

Method = Callable[[Any, Meta, list[Any]], ast.Node]


def _of_children(kind: type[ast.Node], *fields: str) -> Method:
    def method(self: Any, meta: Meta, children: list[Any]) -> ast.Node:
        return kind(origin=self.span(meta), **dict(zip(fields, children, strict=True)))

    return method


def _definition(kind: type[ast.Option] | type[ast.Let]) -> Method:
    def method(self: Any, meta: Meta, children: list[Any]) -> ast.Node:
        override, name, value = children
        named = {"name": str(name), "name_origin": self.at(name)}
        return kind(origin=self.span(meta), value=value, override=override is not None, **named)

    return method


def _constant(value: bool | None) -> Method:
    return lambda self, meta, _: ast.Literal(origin=self.span(meta), value=value)


@v_args(meta=True)
class Builder(Transformer[Token, ast.File]):
    """Builds the AST of one source. Children that the grammar leaves out arrive as None."""

    def __init__(self, source: Source) -> None:
        super().__init__(visit_tokens=False)
        self.source = source
        self.strays: list[Span] = []
        self.giants: list[Span] = []

    def span(self, meta: Meta) -> Span:
        if meta.empty:
            return self.source.span(0, 0)
        return self.source.span(meta.start_pos, meta.end_pos)

    def at(self, token: Token) -> Span:
        assert token.start_pos is not None and token.end_pos is not None
        return self.source.span(token.start_pos, token.end_pos)

    def word(self, token: Token) -> ast.Name:
        return ast.Name(origin=self.at(token), path=str(token))

    # Statements

    def start(self, meta: Meta, children: list[Any]) -> ast.File:
        origin = self.source.span(0, len(self.source.text))
        return ast.File(origin=origin, statements=tuple(c for c in children if c is not None))

    def header(self, meta: Meta, children: list[Any]) -> ast.Header:
        name, *families = children
        words = tuple(
            ast.Name(origin=self.at(f), path=_unquote(f) if f.type == "STRING" else str(f))
            for f in families
        )
        return ast.Header(origin=self.span(meta), name=str(name), families=words)

    def extend(self, meta: Meta, children: list[Any]) -> ast.Extend:
        return ast.Extend(origin=self.span(meta), path=_unquote(children[0]))

    option = _definition(ast.Option)
    let = _definition(ast.Let)

    def require(self, meta: Meta, children: list[Any]) -> ast.Require:
        condition, message = children
        return ast.Require(origin=self.span(meta), condition=condition, message=_unquote(message))

    def style(self, meta: Meta, children: list[Any]) -> ast.Style:
        name, path = children
        return ast.Style(
            origin=self.span(meta), name=str(name), name_origin=self.at(name), path=_unquote(path)
        )

    def section(self, meta: Meta, children: list[Any]) -> ast.Section:
        override, name, on, replicate, items = children
        return ast.Section(
            origin=self.span(meta),
            name=str(name),
            name_origin=self.at(name),
            axes=on or (),
            replicate=replicate or (),
            items=items,
            override=override is not None,
        )

    def on(self, meta: Meta, children: list[Any]) -> tuple[ast.Name, ...]:
        axes: tuple[ast.Name, ...] = children[0]
        return axes

    replicate = on

    def axes(self, meta: Meta, children: list[Any]) -> tuple[ast.Name, ...]:
        return tuple(self.word(c) for c in children if c.type == "NAME")

    def top_when(self, meta: Meta, children: list[Any]) -> ast.When:
        condition, then, *rest = children
        otherwise = (rest[0] if rest else None) or ()
        return ast.When(origin=self.span(meta), condition=condition, then=then, otherwise=otherwise)

    when = top_when

    def _sequence(self, meta: Meta, children: list[Any]) -> tuple[Any, ...]:
        return tuple(c for c in children if c is not None)

    statements = _sequence
    items = _sequence

    def _body(self, meta: Meta, children: list[Any]) -> tuple[Any, ...]:
        return (children[0] if children else None) or ()

    top_body = _body
    section_body = _body

    def stray(self, meta: Meta, children: list[Any]) -> None:
        """A block without a head: a user's mistake, or the rest of a line that was blanked."""
        self.strays.append(self.span(meta))

    # Items

    def rule(self, meta: Meta, children: list[Any]) -> ast.Rule:
        modifiers, target, action = children
        return ast.Rule(origin=self.span(meta), target=target, action=action, **_flags(modifiers))

    def block(self, meta: Meta, children: list[Any]) -> ast.Block:
        modifiers, target, items = children
        optional = _flags(modifiers)["optional"]
        return ast.Block(origin=self.span(meta), target=target, items=items, optional=optional)

    def setting(self, meta: Meta, children: list[Any]) -> ast.Setting:
        modifiers, name, value = children
        return ast.Setting(
            origin=self.span(meta),
            name=str(name),
            name_origin=self.at(name),
            value=value,
            override=_flags(modifiers)["override"],
        )

    def ignore(self, meta: Meta, children: list[Any]) -> ast.Ignore:
        optional, target = children
        return ast.Ignore(origin=self.span(meta), target=target, optional=optional is not None)

    def directive(self, meta: Meta, children: list[Any]) -> ast.Directive:
        modifiers, call = children
        override = _flags(modifiers)["override"]
        return ast.Directive(origin=self.span(meta), call=call, override=override)

    def placement(self, meta: Meta, children: list[Any]) -> ast.Placement:
        name, axes = children
        return ast.Placement(origin=self.span(meta), name=str(name), axes=axes)

    def modifiers(self, meta: Meta, children: list[Any]) -> tuple[str, ...]:
        return tuple(str(c) for c in children)

    def action(self, meta: Meta, children: list[Any]) -> ast.Call:
        name, *arguments = children
        given = tuple(a for a in arguments if a is not None)
        return ast.Call(origin=self.span(meta), name=str(name), arguments=given)

    call = action

    def argument(self, meta: Meta, children: list[Any]) -> ast.Argument:
        name, value = children
        named = None if name is None else str(name)
        return ast.Argument(origin=self.span(meta), name=named, value=value)

    arrow = _of_children(ast.Arrow, "source", "target")

    def selector(self, meta: Meta, children: list[Any]) -> ast.Selector:
        path = next(c for c in children if isinstance(c, Token) and c.type != "CLASS")
        cls = next((c for c in children if isinstance(c, Token) and c.type == "CLASS"), None)
        has = next((c for c in children if isinstance(c, ast.Selector)), None)
        kind = None if cls is None else str(cls)[1:-1]
        return ast.Selector(origin=self.span(meta), path=str(path), cls=kind, has=has)

    picked = selector
    has = selector

    # Expressions

    choice = _of_children(ast.Choice, "condition", "then", "otherwise")

    def binary(self, meta: Meta, children: list[Any]) -> ast.Binary:
        left, op, right = children
        return ast.Binary(origin=self.span(meta), op=str(op), left=left, right=right)

    def not_in(self, meta: Meta, children: list[Any]) -> ast.Unary:
        left, _, op, right = children
        inside = ast.Binary(origin=self.span(meta), op=str(op), left=left, right=right)
        return ast.Unary(origin=self.span(meta), op="not", operand=inside)

    def unary(self, meta: Meta, children: list[Any]) -> ast.Unary:
        op, operand = children
        return ast.Unary(origin=self.span(meta), op=str(op), operand=operand)

    def listing(self, meta: Meta, children: list[Any]) -> ast.List:
        return ast.List(origin=self.span(meta), items=tuple(c for c in children if c is not None))

    def name(self, meta: Meta, children: list[Any]) -> ast.Name:
        return self.word(children[0])

    def number(self, meta: Meta, children: list[Any]) -> ast.Literal:
        value = _number(str(children[0]))
        if value is None:
            self.giants.append(self.span(meta))
        return ast.Literal(origin=self.span(meta), value=value or 0)

    def string(self, meta: Meta, children: list[Any]) -> ast.Literal:
        return ast.Literal(origin=self.span(meta), value=_unquote(children[0]))

    true = _constant(True)
    false = _constant(False)
    null = _constant(None)


def _flags(modifiers: tuple[str, ...] | None) -> dict[str, bool]:
    words = modifiers or ()
    return {"optional": "optional" in words, "override": "override" in words}


def _unquote(token: Token) -> str:
    """The value of a string literal: a backslash escapes a `"` or another backslash."""
    return re.sub(r"\\([\"\\])", r"\1", str(token)[1:-1])


def _number(text: str) -> int | float | None:
    """The value, or None for an integer of more than 64 bits; the grammar bounds the digits."""
    scale = _UNITS.get(text[-1], 1)
    digits = text[:-1] if text[-1] in _UNITS else text
    value: int | float = int(digits) if digits.isdigit() else float(digits)
    value *= scale
    if scale > 1 and value == int(value):
        value = int(value)
    return None if isinstance(value, int) and value >= _LARGEST else value
