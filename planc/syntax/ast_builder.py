"""Parse tree -> AST: one method per grammar rule, each node with its span."""

import re
from collections.abc import Callable
from typing import Any

from lark import Token, Transformer, v_args
from lark.tree import Meta

from planc.diagnostics.source import Source, Span
from planc.syntax import ast

_MODIFIERS = ("optional", "override")
_LISTS = ("axes", "replicate", "sizes")

Method = Callable[[Any, Meta, list[Any]], ast.Node]


def _node(kind: type[ast.Node], *fields: str) -> Method:
    """The method of a rule whose children are the fields of a node, in order.

    A token is its text, a modifier is whether it is there. `modifiers` are those that the node has.
    """
    node_fields = kind.__dataclass_fields__

    def method(self: Any, meta: Meta, children: list[Any]) -> ast.Node:
        values: dict[str, Any] = {}
        for name, child in zip(fields, children, strict=True):
            if name == "modifiers":
                values |= {
                    word: word in (child or ()) for word in _MODIFIERS if word in node_fields
                }
            elif name in _MODIFIERS:
                values[name] = child is not None
            elif isinstance(child, Token):
                values[name] = _unquote(child) if child.type == "STRING" else str(child)
                if f"{name}_origin" in node_fields:
                    values[f"{name}_origin"] = self.span_of(child)
            else:
                values[name] = () if child is None and name in _LISTS else child
        return kind(origin=self.span(meta), **values)

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

    def span_of(self, token: Token) -> Span:
        assert token.start_pos is not None and token.end_pos is not None
        return self.source.span(token.start_pos, token.end_pos)

    def word(self, token: Token) -> ast.Name:
        return ast.Name(origin=self.span_of(token), path=str(token))

    # Statements

    def start(self, meta: Meta, children: list[Any]) -> ast.File:
        origin = self.source.span(0, len(self.source.text))
        return ast.File(origin=origin, statements=tuple(c for c in children if c is not None))

    def header(self, meta: Meta, children: list[Any]) -> ast.Header:
        name, *families = children
        words = tuple(
            ast.Name(origin=self.span_of(f), path=_unquote(f) if f.type == "STRING" else str(f))
            for f in families
        )
        return ast.Header(origin=self.span(meta), name=str(name), families=words)

    language = _node(ast.Language, "version")
    extend = _node(ast.Extend, "path")
    option = _node(ast.Option, "override", "name", "value")
    let = _node(ast.Let, "override", "name", "value")
    require = _node(ast.Require, "condition", "message")
    style = _node(ast.Style, "name", "path")
    section = _node(ast.Section, "override", "name", "axes", "replicate", "items")
    engine_section = _node(ast.Section, "override", "name", "engine", "sizes", "items")

    def sizes(self, meta: Meta, children: list[Any]) -> tuple[ast.Setting, ...]:
        return tuple(children)

    def size(self, meta: Meta, children: list[Any]) -> ast.Setting:
        name, value = children
        return ast.Setting(
            origin=self.span(meta),
            name=str(name),
            name_origin=self.span_of(name),
            value=self.word(value) if isinstance(value, Token) else value,
        )

    def axis_clause(self, meta: Meta, children: list[Any]) -> tuple[ast.Name, ...]:
        axes: tuple[ast.Name, ...] = children[0]
        return axes

    replicate = axis_clause

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

    rule = _node(ast.Rule, "modifiers", "target", "action")
    block = _node(ast.Block, "modifiers", "target", "items")
    setting = _node(ast.Setting, "modifiers", "name", "value")
    ignore = _node(ast.Ignore, "optional", "target")
    directive = _node(ast.Directive, "modifiers", "call")
    placement = _node(ast.Placement, "name", "axes")

    def modifiers(self, meta: Meta, children: list[Any]) -> tuple[str, ...]:
        return tuple(str(c) for c in children)

    def action(self, meta: Meta, children: list[Any]) -> ast.Call:
        name, *arguments = children
        given = tuple(a for a in arguments if a is not None)
        return ast.Call(origin=self.span(meta), name=str(name), arguments=given)

    call = action

    argument = _node(ast.Argument, "name", "value")
    arrow = _node(ast.Arrow, "source", "target")

    def selector(self, meta: Meta, children: list[Any]) -> ast.Selector:
        path = next(c for c in children if isinstance(c, Token) and c.type != "CLASS")
        cls = next((c for c in children if isinstance(c, Token) and c.type == "CLASS"), None)
        has = next((c for c in children if isinstance(c, ast.Selector)), None)
        kind = None if cls is None else str(cls)[1:-1]
        return ast.Selector(origin=self.span(meta), path=str(path), cls=kind, has=has)

    def selectors(self, meta: Meta, children: list[Any]) -> ast.Selector:
        return ast.Selector(origin=self.span(meta), path="", parts=tuple(children))

    picked = selector
    has = selector

    # Expressions

    choice = _node(ast.Choice, "condition", "then", "otherwise")

    binary = _node(ast.Binary, "left", "op", "right")

    def not_in(self, meta: Meta, children: list[Any]) -> ast.Unary:
        left, _, op, right = children
        inside = ast.Binary(origin=self.span(meta), op=str(op), left=left, right=right)
        return ast.Unary(origin=self.span(meta), op="not", operand=inside)

    unary = _node(ast.Unary, "op", "operand")

    def listing(self, meta: Meta, children: list[Any]) -> ast.List:
        return ast.List(origin=self.span(meta), items=tuple(c for c in children if c is not None))

    name = _node(ast.Name, "path")

    def number(self, meta: Meta, children: list[Any]) -> ast.Literal:
        value = ast.number_of(str(children[0]))
        if value is None:
            self.giants.append(self.span(meta))
        return ast.Literal(origin=self.span(meta), value=value or 0)

    string = _node(ast.Literal, "value")
    true = _constant(True)
    false = _constant(False)
    null = _constant(None)


def _unquote(token: Token) -> str:
    """The value of a string literal: a backslash escapes a `"` or another backslash."""
    return re.sub(r"\\([\"\\])", r"\1", str(token)[1:-1])
