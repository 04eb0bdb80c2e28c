"""Parse tree -> AST: one method per grammar rule, each node with its span."""

from __future__ import annotations

import re
from typing import Any

from lark import Token, Transformer, v_args
from lark.tree import Meta

from planc.source import Source, Span
from planc.syntax import tree

_LARGEST = 2**63
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@v_args(meta=True)
class Builder(Transformer[Token, tree.File]):
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

    def word(self, token: Token) -> tree.Name:
        return tree.Name(origin=self.at(token), path=str(token))

    # Statements

    def start(self, meta: Meta, children: list[Any]) -> tree.File:
        origin = self.source.span(0, len(self.source.text))
        return tree.File(origin=origin, statements=tuple(c for c in children if c is not None))

    def header(self, meta: Meta, children: list[Any]) -> tree.Header:
        name, *families = children
        words = tuple(
            tree.Name(origin=self.at(f), path=_unquote(f) if f.type == "STRING" else str(f))
            for f in families
        )
        return tree.Header(origin=self.span(meta), name=str(name), families=words)

    def extend(self, meta: Meta, children: list[Any]) -> tree.Extend:
        return tree.Extend(origin=self.span(meta), path=_unquote(children[0]))

    def option(self, meta: Meta, children: list[Any]) -> tree.Option:
        override, name, value = children
        return tree.Option(
            origin=self.span(meta),
            name=str(name),
            name_origin=self.at(name),
            value=value,
            override=override is not None,
        )

    def let(self, meta: Meta, children: list[Any]) -> tree.Let:
        override, name, value = children
        return tree.Let(
            origin=self.span(meta),
            name=str(name),
            name_origin=self.at(name),
            value=value,
            override=override is not None,
        )

    def require(self, meta: Meta, children: list[Any]) -> tree.Require:
        condition, message = children
        return tree.Require(origin=self.span(meta), condition=condition, message=_unquote(message))

    def style(self, meta: Meta, children: list[Any]) -> tree.Style:
        name, path = children
        return tree.Style(
            origin=self.span(meta),
            name=str(name),
            name_origin=self.at(name),
            path=_unquote(path),
        )

    def section(self, meta: Meta, children: list[Any]) -> tree.Section:
        override, name, on, replicate, items = children
        return tree.Section(
            origin=self.span(meta),
            name=str(name),
            name_origin=self.at(name),
            axes=on or (),
            replicate=replicate or (),
            items=items,
            override=override is not None,
        )

    def on(self, meta: Meta, children: list[Any]) -> tuple[tree.Name, ...]:
        axes: tuple[tree.Name, ...] = children[0]
        return axes

    replicate = on

    def axes(self, meta: Meta, children: list[Any]) -> tuple[tree.Name, ...]:
        return tuple(self.word(c) for c in children if c.type == "NAME")

    def top_when(self, meta: Meta, children: list[Any]) -> tree.When:
        condition, then, *otherwise = children
        return tree.When(
            origin=self.span(meta),
            condition=condition,
            then=then,
            otherwise=(otherwise[0] if otherwise else None) or (),
        )

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
        """A block without a head: a user's slip, or what is left of a line that was blanked."""
        self.strays.append(self.span(meta))

    # Items

    def rule(self, meta: Meta, children: list[Any]) -> tree.Rule:
        modifiers, target, action = children
        return tree.Rule(origin=self.span(meta), target=target, action=action, **_flags(modifiers))

    def block(self, meta: Meta, children: list[Any]) -> tree.Block:
        modifiers, target, items = children
        optional = _flags(modifiers)["optional"]
        return tree.Block(origin=self.span(meta), target=target, items=items, optional=optional)

    def setting(self, meta: Meta, children: list[Any]) -> tree.Setting:
        modifiers, name, value = children
        return tree.Setting(
            origin=self.span(meta),
            name=str(name),
            name_origin=self.at(name),
            value=value,
            override=_flags(modifiers)["override"],
        )

    def ignore(self, meta: Meta, children: list[Any]) -> tree.Ignore:
        optional, target = children
        return tree.Ignore(origin=self.span(meta), target=target, optional=optional is not None)

    def directive(self, meta: Meta, children: list[Any]) -> tree.Directive:
        modifiers, call = children
        override = _flags(modifiers)["override"]
        return tree.Directive(origin=self.span(meta), call=call, override=override)

    def placement(self, meta: Meta, children: list[Any]) -> tree.Placement:
        name, axes = children
        return tree.Placement(origin=self.span(meta), name=str(name), axes=axes)

    def modifiers(self, meta: Meta, children: list[Any]) -> tuple[str, ...]:
        return tuple(str(c) for c in children)

    def action(self, meta: Meta, children: list[Any]) -> tree.Call:
        name, *arguments = children
        return tree.Call(
            origin=self.span(meta),
            name=str(name),
            arguments=tuple(a for a in arguments if a is not None),
        )

    call = action

    def argument(self, meta: Meta, children: list[Any]) -> tree.Argument:
        name, value = children
        return tree.Argument(
            origin=self.span(meta), name=None if name is None else str(name), value=value
        )

    def arrow(self, meta: Meta, children: list[Any]) -> tree.Arrow:
        source, target = children
        return tree.Arrow(origin=self.span(meta), source=source, target=target)

    def selector(self, meta: Meta, children: list[Any]) -> tree.Selector:
        path = next(c for c in children if isinstance(c, Token) and c.type != "CLASS")
        cls = next((c for c in children if isinstance(c, Token) and c.type == "CLASS"), None)
        has = next((c for c in children if isinstance(c, tree.Selector)), None)
        return tree.Selector(
            origin=self.span(meta),
            path=str(path),
            cls=None if cls is None else str(cls)[1:-1],
            has=has,
        )

    picked = selector
    has = selector

    # Expressions

    def choice(self, meta: Meta, children: list[Any]) -> tree.Choice:
        condition, then, otherwise = children
        return tree.Choice(
            origin=self.span(meta), condition=condition, then=then, otherwise=otherwise
        )

    def binary(self, meta: Meta, children: list[Any]) -> tree.Binary:
        left, op, right = children
        return tree.Binary(origin=self.span(meta), op=str(op), left=left, right=right)

    def not_in(self, meta: Meta, children: list[Any]) -> tree.Unary:
        left, _, op, right = children
        inside = tree.Binary(origin=self.span(meta), op=str(op), left=left, right=right)
        return tree.Unary(origin=self.span(meta), op="not", operand=inside)

    def unary(self, meta: Meta, children: list[Any]) -> tree.Unary:
        op, operand = children
        return tree.Unary(origin=self.span(meta), op=str(op), operand=operand)

    def listing(self, meta: Meta, children: list[Any]) -> tree.List:
        return tree.List(origin=self.span(meta), items=tuple(c for c in children if c is not None))

    def name(self, meta: Meta, children: list[Any]) -> tree.Name:
        return self.word(children[0])

    def number(self, meta: Meta, children: list[Any]) -> tree.Literal:
        value = _number(str(children[0]))
        if value is None:
            self.giants.append(self.span(meta))
        return tree.Literal(origin=self.span(meta), value=value or 0)

    def string(self, meta: Meta, children: list[Any]) -> tree.Literal:
        return tree.Literal(origin=self.span(meta), value=_unquote(children[0]))

    def true(self, meta: Meta, children: list[Any]) -> tree.Literal:
        return tree.Literal(origin=self.span(meta), value=True)

    def false(self, meta: Meta, children: list[Any]) -> tree.Literal:
        return tree.Literal(origin=self.span(meta), value=False)

    def null(self, meta: Meta, children: list[Any]) -> tree.Literal:
        return tree.Literal(origin=self.span(meta), value=None)


def _flags(modifiers: tuple[str, ...] | None) -> dict[str, bool]:
    words = modifiers or ()
    return {"optional": "optional" in words, "override": "override" in words}


def _unquote(token: Token) -> str:
    """A string as it is meant: a backslash makes way for a `"`, and for another backslash."""
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
