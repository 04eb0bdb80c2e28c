"""The message of a syntax error: what was found, what was expected, and the likely mistake."""

import re

from lark import UnexpectedCharacters, UnexpectedInput, UnexpectedToken
from lark.lexer import PatternStr

from planc.diagnostics.diagnostic import DidYouMean, Sink, did_you_mean, elsewhere, one_of
from planc.diagnostics.source import Source, Span
from planc.syntax.grammar import parser

CLOSERS = {"{": "}", "(": ")", "[": "]"}
_DIGITS = re.compile(r"[\d.]+")
_SIZE = re.compile(r"(?i)(?<![\w.])(\d+(?:\.\d+)?) *([KMGT])i?b?\Z")
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
_YAML = re.compile(r"\s*(?:- )?(\w+)\s?:\s*(-?[\w.]*)\s*(?:#.*)?")
_FLOW = re.compile(r"\s*(\w+)\s?:\s*\{.*\}\s*")
_ACTIONS = ("unit", "full", "colwise", "rowwise", "sequence", "replicate", "frozen", "none")
_SPACED = re.compile(r"\{[\w*]*,?\s[^{}\n:=]*\}|\{[^{}\n:=]*,\s[^{}\n:=]*\}")
_BLOCK = re.compile(r"\s*\w[\w *]*\{\s")
_TOKENS = {
    r";": "a statement ends with its line: remove the `;`",
    r"//|/\*": "a comment begins with `#`",
    r"&&": "write `and`",
    r"\|\|": "write `or`",
    r"!(?!=)": "write `not`",
    r"\?": "write `when CONDITION then VALUE else VALUE`",
    r"['\u2018-\u201f]": "a text is in double quotes",
    r"->": "layouts are arguments of a style: `colwise(-> replicate)`",
    r"\[\*\]": "every entry of a list is `.*`, as in `model.layers.*`",
}
"""The words of a plan for constructs of other languages, by how these begin."""
_HEADS = {
    r"\}?\s*(?:elif|else\s+(?:if|when))\b": "write `else {`, and in it another `when`",
    r"if\b": "a condition is `when CONDITION {`",
    r"(?:for|while)\b": "there are no loops: a rule is for all modules that its selector matches",
    r"(?:import|include|from)\b": 'a plan is extended by `extend "FILE"`',
    r"plan\s+\w+\s*$": "say for which families: `plan NAME for llama`",
}
"""The same, by how its line begins."""
_KEYWORDS = (
    "plan",
    "language",
    "extend",
    "option",
    "let",
    "require",
    "style",
    "override",
    "when",
    "ignore",
    "optional",
)
_AFTER_NUMBER = {"x": "`*` multiplies", "if": "write `when CONDITION then VALUE else VALUE`"}
_RANGE = re.compile(r"\[(\d+)\.\.\.?(\d+)\]")
_DASHED = re.compile(r"\.(\d+)-(\d{1,9})\b")
_MAX_EXPECTED = 5


def report(error: UnexpectedInput, span: Span, source: Source, sink: Sink, *, lonely: bool) -> None:
    """Reports an error at a token as PL001, PL003, PL004 or PL005; `lonely` ones close nothing."""
    written = span.text
    if written.startswith('"') and isinstance(error, UnexpectedCharacters):
        unclosed_string(source, span.start, sink)
        return
    if written.isdigit() and isinstance(error, UnexpectedCharacters):
        digits = _DIGITS.match(source.text, span.start)
        whole = source.span(span.start, digits.end() if digits else span.end)
        sink.error("PL003", "this number is out of range", whole)
        return
    if lonely:
        sink.error("PL004", f"no bracket is open that this `{written}` could close", span)
        return
    if _misspelled_keyword(span, source, sink):
        return
    line = source.line(span.line)
    spaced = _SPACED.search(line)
    expected = "" if spaced else _expected_tokens(error)
    message = f"unexpected `{written}`" if written.strip() else "the line ends too early"
    if expected:
        message += f": expected {expected}"
    tip = f"a selector has no spaces: write `{''.join(spaced[0].split())}`" if spaced else None
    tip = _likely(written, expected, line, source.text[span.start :]) or tip
    if unit := _SIZE.search(source.text[: span.end]):
        size = f"{unit[1]}{unit[2].upper()}"
        tip = f"units of sizes are KiB, MiB, GiB and TiB, or K, M, G and T: `{size}iB`, `{size}`"
    sink.error("PL001", message, span, help=tip)


def _misspelled_keyword(span: Span, source: Source, sink: Sink) -> bool:
    """Reports the word before a span, where it begins a statement and is nearly a keyword."""
    start = source.offset(span.line)
    head = re.fullmatch(r"\s*(?:override\s+)?([a-z]\w*)\s+", source.text[start : span.start])
    word = head[1] if head else ""
    help = did_you_mean(word, [key for key in _KEYWORDS if key[0] == word[:1] and key != word])
    if head is None or not isinstance(help, DidYouMean):
        return False
    where = source.span(start + head.start(1), start + head.end(1))
    sink.error("PL001", f"no statement begins with `{word}`", where, help=help)
    return True


def _in_place_of_yaml(line: str) -> str | None:
    if flow := _FLOW.fullmatch(line):
        return f"`{flow[1]} {{`, and each setting on a line of its own"
    if not (yaml := _YAML.fullmatch(line)):
        return None
    name, value = yaml[1], "auto" if yaml[2] == "-1" else yaml[2]
    if name in ("plan", "for"):
        return "`plan NAME for FAMILY`"
    if value in _ACTIONS:
        return f"`{name} : {value}`"
    return f"`{name} = {value}`" if value else f"`{name} {{`, and `}}` at its end"


def _likely(written: str, expected: str, line: str, rest: str) -> str | None:
    """The help for a known mistake; `rest` begins with what was found."""
    if written and (advice := _in_place_of_yaml(line)):
        return f"this is YAML; a plan writes {advice}"
    for patterns, text in ((_TOKENS, rest), (_HEADS, line.lstrip())):
        for pattern, advice in patterns.items():
            if re.match(pattern, text):
                return advice
    if "`on`" in expected and written.isidentifier():
        return f"name the axis after `on`: `on {written}`"
    if expected == "`replicate`" and written.isidentifier():
        on = f"replicate on {written}"
        return f"write `{on}` for ranks that hold the same, `*` between axes to shard"
    if span := _RANGE.match(rest):
        return f"a range of entries is `[{span[1]}:{span[2]}]`, which ends before {span[2]}"
    if written == "-" and (span := _DASHED.search(line)):
        return f"a range of entries is `[{span[1]}:{int(span[2]) + 1}]`, without its end"
    if written == "=" and "`on`" in expected:
        word = line.partition("=")[0].strip()
        return (
            elsewhere(word) or f"`{word}` stands in a section, as `tp = 2` does in `mesh {{ ... }}`"
        )
    if written.startswith('"') and (word := written.strip('"')).isidentifier() and ":" in line:
        return f"an action has no quotes: write `{word}`"
    if written == "=" and "`:`" in expected:
        return "a rule is `SELECTOR : ACTION`"
    if written == ":" and expected == "`=`":
        return "a setting is `name = value`"
    if written.isidentifier() and re.search(rf"= *\d+ +{written}\b", line):
        return _AFTER_NUMBER.get(written, f"a number has no unit: remove `{written}`")
    if written == "," and _BLOCK.match(line):
        return "each statement is a line of its own"
    if expected.endswith("`:` or `=`") and not written.strip():
        return elsewhere(line.strip()) or "a rule is `SELECTOR : ACTION`, a setting `name = value`"
    return None


def unclosed_string(source: Source, start: int, sink: Sink) -> None:
    """Reports a `"` at an offset without a closing one on its line."""
    end = source.text.find("\n", start)
    span = source.span(start, end if end >= 0 else len(source.text))
    sink.error("PL005", "this string is not closed on its line", span, help='add the `"`')


def _expected_tokens(error: UnexpectedInput) -> str:
    """The expected tokens, in words; empty where that would be a long list."""
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
    words += sorted(terminal_text(name) for name in names)
    return one_of(words) if len(words) <= _MAX_EXPECTED else ""


def terminal_text(terminal: str) -> str:
    """The text of a terminal of the grammar in a plan, for a message."""
    if terminal in _WORDS:
        return _WORDS[terminal]
    pattern = parser().get_terminal(terminal).pattern
    return f"`{pattern.value}`" if isinstance(pattern, PatternStr) else terminal.lower()
