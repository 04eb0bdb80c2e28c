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
class PlanToken:
    """A token or `#` comment: `fresh` in its line, `blank` follows an empty line; `unary`: sign."""

    kind: str
    text: str
    starts_line: bool
    blank: bool
    unary: bool = False


@dataclass(slots=True)
class BracketItem:
    """The tokens between two commas, with the comments above them and the one after them."""

    lead: list[str] = field(default_factory=list)
    parts: list[TokenOrGroup] = field(default_factory=list)
    trailing: str | None = None
    pending: list[str] = field(default_factory=list)

    def comment(self, token: PlanToken) -> None:
        if token.starts_line:
            self.pending.append(token.text)
            return
        if self.trailing is not None:
            self.lead.append(self.trailing)
        self.trailing = token.text

    def add(self, part: TokenOrGroup) -> None:
        """Appends a part; earlier comments of the item then belong above it, not after it."""
        if self.trailing is not None:
            self.lead.append(self.trailing)
        self.lead += self.pending
        self.trailing, self.pending = None, []
        self.parts.append(part)


@dataclass(slots=True, eq=False)
class BracketGroup:
    """Brackets and their content; two of the same text are not equal.

    Args:
        call: whether the content is the arguments of a name.
        items: separated by commas or, in parentheses, by `and` and `or`.
        tail: comments before the closing bracket.
    """

    open: PlanToken
    call: bool
    items: list[BracketItem]
    tail: list[str]
    close: PlanToken

    @property
    def is_list(self) -> bool:
        """Whether the items are separated by commas."""
        return self.call or self.open.kind == "LSQB"

    @property
    def has_comments(self) -> bool:
        return bool(self.tail) or any(
            i.lead or i.trailing is not None or contains_comments(i.parts) for i in self.items
        )


TokenOrGroup = PlanToken | BracketGroup


def contains_comments(parts: list[TokenOrGroup]) -> bool:
    """Whether there is a comment inside brackets."""
    return any(isinstance(p, BracketGroup) and p.has_comments for p in parts)


@dataclass(slots=True)
class OutputLine:
    """A line of the result: a statement, the head or end of a block, or a comment (no parts)."""

    indent: int
    blank: bool
    parts: list[TokenOrGroup] = field(default_factory=list)
    comment: str | None = None

    @property
    def opens(self) -> bool:
        return bool(self.parts) and _is(self.parts[-1], "LBRACE")

    @property
    def closes(self) -> bool:
        return bool(self.parts) and _is(self.parts[0], "RBRACE")


def _is(part: TokenOrGroup, kind: str) -> bool:
    return isinstance(part, PlanToken) and part.kind == kind


def tokens_of(text: str) -> Iterator[PlanToken]:
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
            yield _token("#", match[0].rstrip(), text[end : match.start()], end)
            end = match.end()
        if token.type != "$END":
            unary = token.type == "MINUS" and not operand
            yield _token(token.type, str(token), text[end : token.start_pos], end, unary=unary)
            operand = token.type in _OPERANDS
        end = token.end_pos


def _token(kind: str, text: str, gap: str, end: int, *, unary: bool = False) -> PlanToken:
    lines = gap.count("\n")
    starts = lines > 0 or end == 0
    return PlanToken(kind=kind, text=text, starts_line=starts, blank=lines > 1, unary=unary)


class TokenReader:
    """Pieces -> lines."""

    def __init__(self, plan_tokens: Iterator[PlanToken]) -> None:
        self.tokens_of = list(plan_tokens)
        self.at = 0
        self.lines: list[OutputLine] = []

    def next(self) -> PlanToken | None:
        return self.tokens_of[self.at] if self.at < len(self.tokens_of) else None

    def take(self) -> PlanToken:
        self.at += 1
        return self.tokens_of[self.at - 1]

    def read(self) -> list[OutputLine]:
        """The lines of a text that matches the grammar, each statement and brace on its own."""
        indent = 0
        starts_statement = True
        while (token := self.next()) is not None:
            if token.kind == "#":
                self.take()
                if token.starts_line:
                    alone = OutputLine(indent=indent, blank=token.blank, comment=token.text)
                    self.lines.append(alone)
                else:
                    self.lines[-1].comment = token.text
                continue
            indent -= token.kind == "RBRACE"
            if starts_statement or token.starts_line or token.kind == "RBRACE":
                self.lines.append(OutputLine(indent=indent, blank=token.blank))
            parts = self.lines[-1].parts
            parts.append(self._part(parts[-1] if parts else None))
            after = self.next()
            starts_statement = token.kind == "LBRACE"
            if token.kind == "LBRACE" and after is not None and after.kind == "RBRACE":
                parts.append(self.take())
                starts_statement = False
            else:
                indent += starts_statement
        return self.lines

    def _part(self, before: TokenOrGroup | None) -> TokenOrGroup:
        token = self.take()
        return self._group(token, before) if token.kind in _OPENERS else token

    def _group(self, opening: PlanToken, before: TokenOrGroup | None) -> BracketGroup:
        call = opening.kind == "LPAR" and before is not None and _is(before, "NAME")
        group = BracketGroup(open=opening, call=call, items=[], tail=[], close=opening)
        item = BracketItem()
        while True:
            token = self.tokens_of[self.at]
            if token.kind in _CLOSERS:
                group.close = self.take()
                break
            if token.kind == "#":
                self.take()
                if item.parts:
                    item.comment(token)
                elif group.items and not token.starts_line:
                    group.items[-1].comment(token)
                else:
                    item.lead.append(token.text)
            elif token.kind == "COMMA":
                self.take()
                item.lead += item.pending
                item.pending = []
                group.items.append(item)
                item = BracketItem()
            elif token.kind in ("AND", "OR") and not group.is_list:
                group.items.append(item)
                item = BracketItem(lead=item.pending)
                item.parts.append(self.take())
            else:
                item.add(self._part(item.parts[-1] if item.parts else None))
        if item.parts:
            group.items.append(item)
            group.tail += item.pending
        else:
            group.tail += item.lead
        return group
