"""The message of a syntax error: what was found, what was expected, and the likely mistake."""

import re

from lark import UnexpectedCharacters, UnexpectedInput, UnexpectedToken
from lark.lexer import PatternStr

from planc.diagnostic import Sink, one_of
from planc.source import Source, Span
from planc.syntax.grammar import parser

CLOSERS = {"{": "}", "(": ")", "[": "]"}
_DIGITS = re.compile(r"[\d.]+")
_WORDS = {
    "NAME": "a name",
    "F1B": "a name",
    "SELECTOR": "a selector",
    "CLASS": "a class",
    "NUMBER": "a number",
    "STRING": "a string",
    "COMPARE": "a comparison",
    "SLASH": "`/`",
}
_SILENT = {"COMMENT", "_NL", "$END", "OPTIONAL", "OVERRIDE"}
_OPERATORS = {"PLUS", "MINUS", "STAR", "SLASH", "COMPARE", "AND", "OR", "NOT", "IN"}
_FREQUENT = {"COLON", "COMMA", "EQUAL"}
_YAML = re.compile(r"\s*(?:- )?(\w+):\s*([\w.]*)\s*(?:#.*)?")
_MAX_EXPECTED = 5


def at_end(error: UnexpectedInput) -> bool:
    """Whether the text ended where more was expected."""
    return isinstance(error, UnexpectedToken) and error.token.type == "$END"


def report(error: UnexpectedInput, span: Span, source: Source, sink: Sink, *, lonely: bool) -> None:
    """Reports an error at a token as PL001, PL003, PL004 or PL005; `lonely` ones close nothing."""
    found = span.text
    if found.startswith('"') and isinstance(error, UnexpectedCharacters):
        unclosed_string(source, span.start, sink)
        return
    if found.isdigit() and isinstance(error, UnexpectedCharacters):
        digits = _DIGITS.match(source.text, span.start)
        whole = source.span(span.start, digits.end() if digits else span.end)
        sink.error("PL003", "this number is out of range", whole)
        return
    if lonely:
        sink.error("PL004", f"no bracket is open that this `{found}` could close", span)
        return
    line = source.line(span.line)
    spaced = re.search(r"\{[\w*]*,?\s[^{}\n]*\}", line) or re.search(
        r"\{[^{}\n]*,\s[^{}\n]*\}", line
    )
    expected = "" if spaced else _expected(error)
    message = f"unexpected `{found}`" if found.strip() else "the line ends too early"
    if expected:
        message += f": expected {expected}"
    tip = None
    if spaced:
        tip = f"a selector has no spaces: write `{''.join(spaced[0].split())}`"
    if found and (yaml := _YAML.fullmatch(line)):
        told = f"{yaml[1]} = {yaml[2]}" if yaml[2] else f"{yaml[1]} {{"
        tip = f"this is YAML; a plan writes `{told}`" + ("" if yaml[2] else ", and `}` at its end")
    elif "`on`" in expected and found.isidentifier():
        tip = f"name the axis after `on`: `on {found}`"
    elif source.text.startswith("[*]", span.start):
        tip = "every entry of a list is `.*`, as in `model.layers.*`"
    sink.error("PL001", message, span, help=tip)


def unclosed_string(source: Source, start: int, sink: Sink) -> None:
    """Reports a `"` at an offset without a closing one on its line."""
    end = source.text.find("\n", start)
    span = source.span(start, end if end >= 0 else len(source.text))
    sink.error("PL005", "this string is not closed on its line", span, help='add the `"`')


def _expected(error: UnexpectedInput) -> str:
    """What was expected, in words; empty where that would be a long list."""
    if isinstance(error, UnexpectedCharacters):
        names = set(error.allowed or ())
    elif isinstance(error, UnexpectedToken):
        names = set(error.accepts or error.expected or ())
    else:
        return ""
    names -= _SILENT
    words = []
    if names >= {"PLUS", "MINUS"}:
        names -= _OPERATORS
        words = ["an operator"]
    elif names >= {"NUMBER", "STRING", "NAME"}:
        return "a value"
    if len(words) + len(names) > _MAX_EXPECTED:
        names &= _FREQUENT
    words += sorted(written(name) for name in names)
    return one_of(words) if len(words) <= _MAX_EXPECTED else ""


def written(terminal: str) -> str:
    """How a terminal of the grammar is written in a plan, for a message."""
    if terminal in _WORDS:
        return _WORDS[terminal]
    pattern = parser().get_terminal(terminal).pattern
    return f"`{pattern.value}`" if isinstance(pattern, PatternStr) else terminal.lower()
