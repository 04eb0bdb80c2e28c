"""The parser that lark makes of `grammars/plan.lark`, once a process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from lark import Lark, Token

from planc.share import GRAMMARS


class _Brackets:
    """Drops newlines inside ( ) and [ ], where a statement may go on over several lines."""

    always_accept = ("_NL",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        depth = 0
        for token in stream:
            if token.type in ("LPAR", "LSQB"):
                depth += 1
            elif token.type in ("RPAR", "RSQB"):
                depth -= 1
            if token.type == "_NL" and depth > 0:
                continue
            yield token


@cache
def parser() -> Lark:
    grammar = (GRAMMARS / "plan.lark").read_text(encoding="utf-8")
    return Lark(
        grammar,
        parser="lalr",
        lexer="contextual",
        propagate_positions=True,
        maybe_placeholders=True,
        postlex=_Brackets(),
    )
