"""A plan's tokens and comments, grouped by lines and brackets: the formatter's input.

The tokens are the parser's own, so the syntax is defined in one place; comments are found in the
text between tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lark import Token

from planc.syntax.grammar import parser

_COMMENT = re.compile(r"#[^\n]*")
_OPENERS = ("LPAR", "LSQB")
_CLOSERS = ("RPAR", "RSQB")
_OPERANDS = frozenset(
    ("NAME", "SELECTOR", "CLASS", "NUMBER", "STRING", "TRUE", "FALSE", "NULL", *_CLOSERS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A token or a comment.

    Args:
        kind: the token's type, or `#`.
        text: as written; a comment without trailing spaces.
        fresh: whether it is the first of its line.
        blank: whether a blank line precedes it.
        unary: whether it is a sign, not a subtraction.
    """

    kind: str
    text: str
    fresh: bool
    blank: bool
    unary: bool = False


@dataclass(slots=True)
class Item:
    """The tokens between two commas, with the comments above them and the one after them."""

    lead: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    trailing: str | None = None
    pending: list[str] = field(default_factory=list)

    def comment(self, piece: Piece) -> None:
        if piece.fresh:
            self.pending.append(piece.text)
            return
        if self.trailing is not None:
            self.lead.append(self.trailing)
        self.trailing = piece.text

    def add(self, part: Part) -> None:
        """Appends a part; earlier comments of the item then belong above it, not after it."""
        if self.trailing is not None:
            self.lead.append(self.trailing)
        self.lead += self.pending
        self.trailing, self.pending = None, []
        self.parts.append(part)


@dataclass(slots=True)
class Group:
    """Brackets and their content.

    Args:
        open: the opening bracket.
        call: whether the content is the arguments of a name.
        items: separated by commas or, in parentheses, by `and` and `or`.
        tail: comments before the closing bracket.
        close: the closing bracket.
    """

    open: Piece
    call: bool
    items: list[Item]
    tail: list[str]
    close: Piece

    @property
    def listed(self) -> bool:
        """Whether the items are separated by commas."""
        return self.call or self.open.kind == "LSQB"

    @property
    def commented(self) -> bool:
        return bool(self.tail) or any(
            i.lead or i.trailing is not None or commented(i.parts) for i in self.items
        )


Part = Piece | Group


def commented(parts: list[Part]) -> bool:
    """Whether there is a comment inside brackets."""
    return any(isinstance(p, Group) and p.commented for p in parts)


@dataclass(slots=True)
class Line:
    """A line of the result: a statement, the head or the end of a block, or a comment.

    Args:
        indent: the number of enclosing blocks.
        blank: whether a blank line precedes it.
        parts: empty for a comment on its own.
        comment: on its own, or after the parts.
    """

    indent: int
    blank: bool
    parts: list[Part] = field(default_factory=list)
    comment: str | None = None

    @property
    def opens(self) -> bool:
        return bool(self.parts) and _is(self.parts[-1], "LBRACE")

    @property
    def closes(self) -> bool:
        return bool(self.parts) and _is(self.parts[0], "RBRACE")


def _is(part: Part, kind: str) -> bool:
    return isinstance(part, Piece) and part.kind == kind


def pieces(text: str) -> Iterator[Piece]:
    """The tokens and comments of a text, in order.

    Raises:
        UnexpectedInput: the text is not in the grammar.
    """
    session = parser().parse_interactive(text)
    tokens = [t for t in session.exhaust_lexer() if t.type != "_NL"]
    end = 0
    operand = False
    for token in [*tokens, Token("$END", "", start_pos=len(text), end_pos=len(text))]:
        assert token.start_pos is not None and token.end_pos is not None
        for match in _COMMENT.finditer(text, end, token.start_pos):
            yield _piece("#", match[0].rstrip(), text[end : match.start()], end)
            end = match.end()
        if token.type != "$END":
            unary = token.type == "MINUS" and not operand
            yield _piece(token.type, str(token), text[end : token.start_pos], end, unary=unary)
            operand = token.type in _OPERANDS
        end = token.end_pos


def _piece(kind: str, text: str, gap: str, end: int, *, unary: bool = False) -> Piece:
    lines = gap.count("\n")
    return Piece(kind=kind, text=text, fresh=lines > 0 or end == 0, blank=lines > 1, unary=unary)


class Reader:
    """Pieces -> lines."""

    def __init__(self, found: Iterator[Piece]) -> None:
        self.pieces = list(found)
        self.at = 0
        self.lines: list[Line] = []

    def next(self) -> Piece | None:
        return self.pieces[self.at] if self.at < len(self.pieces) else None

    def take(self) -> Piece:
        self.at += 1
        return self.pieces[self.at - 1]

    def read(self) -> list[Line]:
        """The lines of a text that matches the grammar, each statement and each brace on its
        own.
        """
        indent = 0
        begin = True
        while (piece := self.next()) is not None:
            if piece.kind == "#":
                self.take()
                self._comment(piece, indent)
                continue
            indent -= piece.kind == "RBRACE"
            if begin or piece.fresh or piece.kind == "RBRACE":
                self.lines.append(Line(indent=indent, blank=piece.blank))
            parts = self.lines[-1].parts
            parts.append(self._part(parts[-1] if parts else None))
            after = self.next()
            begin = piece.kind == "LBRACE"
            if piece.kind == "LBRACE" and after is not None and after.kind == "RBRACE":
                parts.append(self.take())
                begin = False
            else:
                indent += begin
        return self.lines

    def _comment(self, piece: Piece, indent: int) -> None:
        if piece.fresh:
            self.lines.append(Line(indent=indent, blank=piece.blank, comment=piece.text))
        else:
            self.lines[-1].comment = piece.text

    def _part(self, before: Part | None) -> Part:
        piece = self.take()
        return self._group(piece, before) if piece.kind in _OPENERS else piece

    def _group(self, opening: Piece, before: Part | None) -> Group:
        call = opening.kind == "LPAR" and before is not None and _is(before, "NAME")
        group = Group(open=opening, call=call, items=[], tail=[], close=opening)
        item = Item()
        while True:
            piece = self.pieces[self.at]
            if piece.kind in _CLOSERS:
                group.close = self.take()
                break
            if piece.kind == "#":
                self.take()
                self._inside(piece, item, group)
            elif piece.kind == "COMMA":
                self.take()
                item.lead += item.pending
                item.pending = []
                group.items.append(item)
                item = Item()
            elif piece.kind in ("AND", "OR") and not group.listed:
                group.items.append(item)
                item = Item(lead=item.pending)
                item.parts.append(self.take())
            else:
                item.add(self._part(item.parts[-1] if item.parts else None))
        if item.parts:
            group.items.append(item)
            group.tail += item.pending
        else:
            group.tail += item.lead
        return group

    def _inside(self, piece: Piece, item: Item, group: Group) -> None:
        if item.parts:
            item.comment(piece)
        elif group.items and not piece.fresh:
            group.items[-1].comment(piece)
        else:
            item.lead.append(piece.text)
