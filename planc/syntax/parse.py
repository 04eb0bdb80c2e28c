"""Text -> AST, with every syntax error of a file in one run.

The file is parsed whole. On an error the line that holds it is blanked out (its braces stay, so the
blocks around it keep their shape) and the rest is parsed again, until nothing is left to report:
each diagnostic is one real mistake, and the good statements still give an AST.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from lark import Lark, Token, UnexpectedCharacters, UnexpectedInput, UnexpectedToken
from lark.exceptions import UnexpectedEOF

from planc.diagnostic import Label, Sink
from planc.share import GRAMMARS
from planc.source import Source, Span
from planc.syntax import tree
from planc.syntax.build import Builder

MAX_CHARACTERS = 1_000_000
MAX_NESTING = 64
MAX_ERRORS = 20


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
def _parser() -> Lark:
    grammar = (GRAMMARS / "plan.lark").read_text(encoding="utf-8")
    return Lark(
        grammar,
        parser="lalr",
        lexer="contextual",
        propagate_positions=True,
        maybe_placeholders=True,
        postlex=_Brackets(),
    )


def parse(source: Source, sink: Sink) -> tree.File:
    """The AST of a source; what can't be parsed is reported and left out.

    Args:
        source: the text of a `.plan` file.
        sink: receives PL001 to PL006.
    """
    empty = tree.File(origin=source.span(0, len(source.text)), statements=())
    if not _readable(source, sink):
        return empty
    text = source.text + "\n"
    for _ in range(MAX_ERRORS):
        try:
            parsed = _parser().parse(text)
        except UnexpectedInput as error:
            span = _place(error, source, text)
            _report(error, span, source, text, sink)
            text = _blank(text, span, _lacks_brace(error))
        else:
            builder = Builder(source)
            file: tree.File = builder.transform(parsed)
            for stray in builder.strays:
                if text.startswith(source.line(stray.line), source.offset(stray.line)):
                    sink.error(
                        "PL001",
                        "this block has no head",
                        source.span(stray.start, stray.start + 1),
                        help="write what it is for, such as `tensor on tp {`",
                    )
            if not file.statements and not sink.failed:
                sink.error(
                    "PL002",
                    f"{source.name} holds no statement",
                    source.span(0, 0),
                    help="a plan starts with `plan NAME for FAMILY`",
                )
            return file
    sink.error(
        "PL001",
        f"more than {MAX_ERRORS} syntax errors; the rest is not shown",
        source.span(0, 0),
    )
    return empty


def _readable(source: Source, sink: Sink) -> bool:
    """Whether the text is fit for the parser at all: no giant, nothing binary, no deep nest."""
    text = source.text
    if len(text) > MAX_CHARACTERS:
        sink.error(
            "PL003",
            f"{source.name} has {len(text):,} characters; a plan has at most {MAX_CHARACTERS:,}",
            help="is this a .plan file?",
        )
        return False
    binary = re.search(r"[\x00-\x08\x0b\x0e-\x1f\ufffd]", text)
    if binary:
        sink.error(
            "PL003",
            f"{source.name} is not text: it holds U+{ord(binary[0]):04X}",
            source.span(binary.start(), binary.end()),
            help="a .plan file is UTF-8 text",
        )
        return False
    depth = 0
    for match in re.finditer(r"[{}()\[\]]", _masked(text)):
        depth += 1 if match[0] in "{([" else -1
        if depth > MAX_NESTING:
            sink.error(
                "PL003",
                f"brackets nest deeper than {MAX_NESTING}",
                source.span(match.start(), match.end()),
                help="a `let` gives a long selector or expression a name",
            )
            return False
    # a run of operators nests without brackets, and so would overflow whoever walks the tree
    for line in re.finditer(r"[^\n]+", text):
        if len(line[0]) > 10_000:
            sink.error(
                "PL003",
                "this line has more than 10,000 characters",
                source.span(line.start(), line.start() + 80),
            )
            return False
    return True


def _masked(text: str) -> str:
    """The text with comments and strings blanked, for looking at brackets."""
    return re.sub(r'#[^\n]*|"(?:\\.|[^"\\\n])*"', lambda m: " " * len(m[0]), text)


def _place(error: UnexpectedInput, source: Source, text: str) -> Span:
    """The span of the token that does not fit."""
    if isinstance(error, UnexpectedEOF) or _at_end(error):
        return _unclosed(source, text)
    start = error.pos_in_stream or 0
    end = start + 1
    if isinstance(error, UnexpectedToken) and error.token.end_pos is not None:
        end = error.token.end_pos
    if isinstance(error, UnexpectedToken) and error.token.type == "_NL":
        end = start
    return source.span(start, min(end, len(source.text)))


def _at_end(error: UnexpectedInput) -> bool:
    return isinstance(error, UnexpectedToken) and error.token.type == "$END"


def _unclosed(source: Source, text: str) -> Span:
    """The innermost bracket that is still open at the end of the file."""
    open_: list[int] = []
    for match in re.finditer(r"[{}()\[\]]", _masked(text)):
        if match[0] in "{([":
            open_.append(match.start())
        elif open_:
            open_.pop()
    start = open_[-1] if open_ else max(0, len(source.text.rstrip()) - 1)
    return source.span(start, start + 1)


def _lacks_brace(error: UnexpectedInput) -> bool:
    """Whether a head ended without its `{`."""
    return (
        isinstance(error, UnexpectedToken)
        and error.token.type == "_NL"
        and "LBRACE" in (error.accepts or error.expected or ())
    )


def _blank(text: str, span: Span, lacks_brace: bool) -> str:
    """The text, of the same length, without the line that holds the error."""
    first = _opener_line(text, span)
    start = text.rfind("\n", 0, first) + 1
    end = text.find("\n", span.start if first == span.start else first)
    line = text[start:end]
    masked = _masked(line).strip()
    if not masked:  # only reachable for an error after the last statement
        return " " * len(text[:-1]) + "\n"
    closes = masked.startswith("}")
    opens = lacks_brace or masked.endswith("{")
    inner = " " * len(line)
    if closes:
        inner = "}" + inner[1:]
    if opens and len(line) > 1:
        inner = inner[:-1] + "{"
        if closes and len(line) > 2:
            inner = inner[0] + "\n" + inner[2:]
    if inner == line:  # a bracket alone on its line that nothing matches
        inner = " " * len(line)
    return text[:start] + inner + text[end:]


def _opener_line(text: str, span: Span) -> int:
    """Where the statement with the error starts: at the outermost ( or [ still open before it."""
    open_: list[int] = []
    for match in re.finditer(r"[()\[\]]", _masked(text[: span.start])):
        if match[0] in "([":
            open_.append(match.start())
        elif open_:
            open_.pop()
    return open_[0] if open_ else span.start


_WORDS = {
    "NAME": "a name",
    "SELECTOR": "a selector",
    "CLASS": "a class",
    "NUMBER": "a number",
    "STRING": "a string",
    "COLON": "`:`",
    "COMMA": "`,`",
    "EQUAL": "`=`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "_NL": "a new line",
    "$END": "the end",
    "__ANON_0": "`->`",
}
_CLOSERS = {"{": "}", "(": ")", "[": "]"}
_OPERATORS = {"PLUS", "MINUS", "STAR", "SLASH", "COMPARE", "AND", "OR", "NOT", "IN"}


def _expected(error: UnexpectedInput) -> str:
    """What could have stood there, in words."""
    if isinstance(error, UnexpectedCharacters):
        names = set(error.allowed or ())
    elif isinstance(error, UnexpectedToken):
        names = set(error.accepts or error.expected or ())
    else:
        return ""
    names -= {"COMMENT", "_NL", "$END", "OPTIONAL", "OVERRIDE"}
    if names >= {"PLUS", "MINUS"}:
        names -= _OPERATORS
        words = ["an operator"]
    elif names >= {"NUMBER", "STRING", "NAME"}:
        return "a value"
    else:
        words = []
    words += sorted(_WORDS.get(n, f"`{n.lower()}`") for n in names)
    if not words or len(words) > 5:
        return ""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _report(error: UnexpectedInput, span: Span, source: Source, text: str, sink: Sink) -> None:
    line = source.line(span.line)
    found = span.text
    if isinstance(error, UnexpectedEOF) or _at_end(error):
        sink.error(
            "PL004",
            f"this `{found}` is never closed",
            span,
            help=f"close it with `{_CLOSERS.get(found, '}')}`",
        )
        return
    if found.startswith('"'):
        sink.error("PL005", "this string is not closed on its line", span, help='add the `"`')
        return
    if found == "}" or (found in ")]" and found):
        sink.error("PL004", f"nothing is open that this `{found}` could close", span)
        return
    spaced = re.search(r"\{[\w*]*,?\s[^{}\n]*\}", line) or re.search(
        r"\{[^{}\n]*,\s[^{}\n]*\}", line
    )
    expected = _expected(error)
    message = f"unexpected `{found}`" if found.strip() else "the line ends too early"
    if expected:
        message += f": expected {expected}"
    tip = None
    if spaced:
        tip = f"a selector has no spaces inside: write `{''.join(spaced[0].split())}`"
    elif found == "{":
        tip = "a block needs a head, such as `tensor on tp {`"
    sink.error("PL001", message, Label(span=span, text="here"), help=tip)
