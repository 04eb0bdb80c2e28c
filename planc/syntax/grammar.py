"""The LALR parser that lark builds from `grammars/plan.lark`, once per process."""

import hashlib
import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import lark
from lark import Lark, Token
from lark.grammar import Rule
from lark.lexer import TerminalDef

from planc.files.resources import GRAMMARS

_TABLE = "plan.table.json"


class _Brackets:
    """Drops newlines inside ( ) and [ ], where a statement may span several lines."""

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
    """The parser, from the shipped table if that matches this grammar and this version of lark.

    Building the table takes a quarter of the time of a warm check.
    """
    text = (GRAMMARS / "plan.lark").read_text(encoding="utf-8")
    try:
        return _from_table((GRAMMARS / _TABLE).read_text(encoding="utf-8"), text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _build(text)


def _build(text: str) -> Lark:
    return Lark(
        text,
        parser="lalr",
        lexer="contextual",
        propagate_positions=True,
        maybe_placeholders=True,
        postlex=_Brackets(),
    )


def _from_table(stored: str, text: str) -> Lark:
    """The parser of a stored table.

    Raises:
        ValueError: the table belongs to another grammar or another version of lark.
    """
    content = json.loads(stored)
    if content["made_from"] != _made_from(text):
        raise ValueError("the table is stale")
    rules = content["data"]["parser"]["parser"]
    # JSON has no numbers for keys
    rules["tokens"] = {int(k): v for k, v in rules["tokens"].items()}
    rules["states"] = {
        int(state): {int(k): v for k, v in actions.items()}
        for state, actions in rules["states"].items()
    }
    memo = {int(k): v for k, v in content["memo"].items()}
    loaded: Lark = Lark._load_from_dict(  # type: ignore[no-untyped-call]
        content["data"], memo, postlex=_Brackets()
    )
    return loaded


_UNBOUNDED = 2**32 - 1
"""The width of a pattern without an upper bound: releases of Python 3.11 have different ones."""


def table(text: str) -> str:
    """The table of a grammar as JSON, in the format of lark's stand-alone parser generator."""
    data, memo = _build(text).memo_serialize([TerminalDef, Rule])
    data["options"]["postlex"] = None
    data["parser"]["parser"] = _renumber(data["parser"]["parser"])
    for terminal in memo.values():
        pattern = terminal.get("pattern", {})
        if "_width" in pattern:
            pattern["_width"] = [min(width, _UNBOUNDED) for width in pattern["_width"]]
    content = {"made_from": _made_from(text), "data": data, "memo": memo}
    return json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n"


def _renumber(rules: dict[str, Any]) -> dict[str, Any]:
    """The parser's actions with tokens and states in the order in which the grammar reaches them:
    lark numbers them by addresses in memory, another way in each process.
    """
    names: dict[int, str] = rules["tokens"]
    states = {
        state: sorted((names[token], *action) for token, action in actions.items())
        for state, actions in rules["states"].items()
    }
    reached = list(rules["start_states"].values())
    for state in reached:  # which grows meanwhile
        shifts = (at for _, kind, at in states[state] if kind == 0)
        reached += [at for at in dict.fromkeys(shifts) if at not in reached]
    state_of = {state: number for number, state in enumerate(reached)}
    token_of = {name: number for number, name in enumerate(sorted({*names.values()}))}
    return {
        "tokens": {number: name for name, number in token_of.items()},
        "states": {
            number: {
                token_of[name]: (kind, at if kind else state_of[at])
                for name, kind, at in states[state]
            }
            for state, number in state_of.items()
        },
        "start_states": {name: state_of[at] for name, at in rules["start_states"].items()},
        "end_states": {name: state_of[at] for name, at in rules["end_states"].items()},
    }


def _made_from(text: str) -> str:
    return f"lark {lark.__version__}, grammar {hashlib.sha256(text.encode()).hexdigest()}"


if __name__ == "__main__":
    sys.stdout.write(table((GRAMMARS / "plan.lark").read_text(encoding="utf-8")))
