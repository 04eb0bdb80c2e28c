"""Text -> AST, with every syntax error of a file in one run.

The file is parsed as a whole. After an error, the statement that contains it is blanked out (except
braces that belong to blocks around it) and the rest is parsed again, until no error is left. So
each diagnostic is one real mistake, and the valid statements still give an AST.
"""

import re
from collections.abc import Collection, Sequence

from lark import Token, UnexpectedInput, UnexpectedToken
from lark import Tree as _Tree
from lark.exceptions import UnexpectedEOF

from planc.diagnostics.diagnostic import Label, Sink, one_of
from planc.diagnostics.source import MAX_CHARACTERS, Source, Span
from planc.syntax import ast, error_recovery, syntax_errors
from planc.syntax.ast_builder import Builder
from planc.syntax.grammar import parser

_CONDITION = re.compile(r"\s*(?:(when|if)|\}\s*(?:elif|else\s+(?:if|when)))\b[^{}\n]*\{\s*")
MAX_LINE = 10_000
MAX_NESTING = 64
MAX_ERRORS = 20
_MAX_READ = 3_000_000
LANGUAGES = ("1",)
"""The versions of the language that a plan may state, the newest last."""
_BINARY = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\ufffd\ud800-\udfff]|\r(?!\n)")
Parsed = _Tree[Token]
_NESTED_BLOCKS = ("section", "block", "top_when", "when")
_NESTED_VALUES = ("binary", "unary", "not_in", "choice", "listing", "call", "action")
_NESTING = frozenset((*_NESTED_BLOCKS, *_NESTED_VALUES))


def parse(source: Source, sink: Sink) -> ast.File:
    """The AST of a source, perhaps with a byte order mark, but for what PL001 to PL005 report."""
    empty = ast.File(origin=source.span(0, len(source.text)), statements=())
    if not _readable(source, sink):
        return empty
    errors = sink.errors
    text = source.text + "\n"
    if text.startswith("\ufeff"):
        text = " " + text[1:]
    text, ends = _close_brackets(source, text, sink)
    # a large file must not be parsed twenty times
    for _ in range(max(2, min(MAX_ERRORS, _MAX_READ // len(text)))):
        try:
            parsed = _parse_tree(text, ends)
        except UnexpectedInput as error:
            text, ends = _recover(error, source, text, ends, sink)
            continue
        deep = _too_deep(parsed)
        if deep is not None:
            message = f"blocks, brackets and operators nest deeper than {MAX_NESTING}"
            help = "give the inner parts names with `let`"
            sink.error("PL003", message, source.span(deep, deep + 1), help=help)
            text = _blank(text, deep)
            continue
        return _build_file(parsed, source, text, sink, quiet=sink.errors > errors)
    many = sink.errors - errors
    sink.error("PL001", f"{source.name} has more than {many} syntax errors; the rest is not shown")
    return empty


def _build_file(parsed: Parsed, source: Source, text: str, sink: Sink, *, quiet: bool) -> ast.File:
    """The AST of a text that parses, and the errors that only the AST shows."""
    builder = Builder(source)
    file: ast.File = builder.transform(parsed)
    for stray in builder.strays:
        if text.startswith(source.line(stray.line), source.offset(stray.line)):
            brace = source.span(stray.start, stray.start + 1)
            help = "write the head, such as `tensor on tp {`"
            sink.error("PL001", "this block has no head", brace, help=help)
    for statement in file.statements:
        if isinstance(statement, ast.Language) and statement.version not in LANGUAGES:
            message = f"this planc reads language {one_of(LANGUAGES)}, not {statement.version}"
            sink.error("PL745", message, statement.origin, help="pip install --upgrade planc")
    for number in builder.giants:
        sink.error("PL003", "this number is out of range", number)
    if not (file.statements or quiet or builder.strays):
        help = "a plan starts with `plan NAME for FAMILY`"
        sink.error("PL002", f"{source.name} holds no statement", source.span(0, 0), help=help)
    return file


def _readable(source: Source, sink: Sink) -> bool:
    """Whether the text can be parsed at all: not too long, not binary, not nested too deep."""
    text = source.text
    if len(text) > MAX_CHARACTERS:
        size = f"{len(text):,} characters; a plan has at most {MAX_CHARACTERS:,}"
        sink.error("PL003", f"{source.name} has {size}", help="is this a .plan file?")
        return False
    binary = _BINARY.search(text)
    if binary:
        code = ord(binary[0])
        reason = f"it holds U+{code:04X}" if code < 0x80 else "it is not UTF-8"
        where, help = source.span(binary.start(), binary.end()), "a .plan file is UTF-8 text"
        sink.error("PL003", f"{source.name} is not text: {reason}", where, help=help)
        return False
    start = 0
    for line in text.split("\n"):
        if len(line) > MAX_LINE:
            message = f"this line has more than {MAX_LINE:,} characters"
            sink.error("PL003", message, source.span(start, start + 80))
            return False
        start += len(line) + 1
    return _shallow(source, sink)


def _shallow(source: Source, sink: Sink) -> bool:
    depth = 0
    for match in re.finditer(r"[{}()\[\]]", error_recovery.mask_text(source.text)):
        depth += 1 if match[0] in "{([" else -1
        if depth > MAX_NESTING:
            where = source.span(match.start(), match.end())
            help = "a `let` gives a long selector or expression a name"
            sink.error("PL003", f"brackets nest deeper than {MAX_NESTING}", where, help=help)
            return False
    return True


def _close_brackets(source: Source, text: str, sink: Sink) -> tuple[str, tuple[int, ...]]:
    """Reports opening brackets without a closing one; returns the text without their statements,
    and the offsets at which the parser inserts a missing `}`.
    """
    ends = []
    for unclosed in error_recovery.brackets(error_recovery.mask_text(text)).unclosed[:MAX_ERRORS]:
        quote = (
            None if unclosed.end is not None else error_recovery.open_string(text, unclosed.start)
        )
        if quote is None:
            _report_unclosed(unclosed, source, sink)
        else:  # the unclosed string contains the closing bracket
            syntax_errors.unclosed_string(source, quote, sink)
        if unclosed.end is None:
            text = _blank(text, unclosed.start)
        else:
            ends.append(unclosed.end)
    return text, tuple(sorted(ends))


def _report_unclosed(unclosed: error_recovery.Unclosed, source: Source, sink: Sink) -> None:
    span = source.span(unclosed.start, unclosed.start + 1)
    labels = [Label(span=span)]
    if unclosed.end is not None and unclosed.end < len(source.text):
        line, _ = source.position(unclosed.end)
        end = unclosed.end + len(source.line(line))
        note = "by the indentation, it ends before this line"
        labels.append(Label(span=source.span(unclosed.end, end), text=note))
    help = f"close it with `{syntax_errors.CLOSERS[span.text]}`"
    sink.error("PL004", f"this `{span.text}` is never closed", *labels, help=help)


def _parse_tree(text: str, ends: Sequence[int]) -> Parsed:
    """The parse tree of a text with a `}` inserted on a line of its own at each of some offsets.

    Raises:
        UnexpectedInput: the text does not match the grammar.
    """
    if not ends:
        return parser().parse(text)
    session = parser().parse_interactive(text)
    waiting = list(ends)
    last = Token("_NL", "\n", start_pos=0, end_pos=0)
    for token in session.lexer_thread.lex(session.parser_state):  # type: ignore[no-untyped-call]
        session.feed_token(token)
        last = token
        while waiting and token.type == "_NL" and (token.end_pos or 0) >= waiting[0]:
            at = token.start_pos
            session.feed_token(Token("RBRACE", "", start_pos=at, end_pos=at))
            session.feed_token(Token("_NL", "", start_pos=at, end_pos=token.end_pos))
            waiting.pop(0)
    parsed: Parsed = session.feed_eof(last)  # type: ignore[no-untyped-call]
    return parsed


def _recover(
    error: UnexpectedInput, source: Source, text: str, ends: tuple[int, ...], sink: Sink
) -> tuple[str, tuple[int, ...]]:
    """Reports an error; returns the text without it, and the `}` that still have to be inserted."""
    token = _token(error)
    if token.type == "RBRACE" and not token:
        # a guess that did not fit; its brace is already reported
        rest = list(ends)
        at = token.start_pos or 0
        rest.remove(min((e for e in ends if e > at), default=max(ends)))
        return text, tuple(rest)
    if isinstance(error, UnexpectedEOF) or token.type == "$END":
        end = len(source.text.rstrip())
        span = source.span(max(0, end - 1), end)
        sink.error("PL001", "the file ends too early", span)
        return "\n", ()
    span = _place(error, source)
    forgotten = _forgotten(span, source, text, ends)
    if forgotten:
        for bracket in forgotten:
            _report_unclosed(bracket, source, sink)
        return text, tuple(sorted((*ends, *(u.end for u in forgotten if u.end is not None))))
    lonely = error_recovery.brackets(error_recovery.mask_text(text), ends).lonely
    if not _is_orphan_else(error, source, text):
        syntax_errors.report(error, span, source, sink, lonely=span.start in lonely)
    return _blank(text, span.start, lonely, head=bool(lonely) and _lacks_brace(error)), ends


def _forgotten(
    span: Span, source: Source, text: str, ends: tuple[int, ...]
) -> list[error_recovery.Unclosed]:
    """The blocks before a misplaced `{` that, by the indentation, should end before it.

    Their missing `}` does not show in the number of braces if there is an extra one elsewhere.
    """
    if span.text != "{":
        return []
    line = text.rfind("\n", 0, span.start) + 1
    unclosed = error_recovery.guess_unclosed(error_recovery.mask_text(text))
    ending_here = [u for u in unclosed if u.end == line and u.end not in ends]
    # a brace that stands for one that was reported as missing is not in the source
    return [u for u in ending_here if source.text.startswith("{", u.start)]


def _is_orphan_else(error: UnexpectedInput, source: Source, text: str) -> bool:
    """Whether this is the `else` of a `when` that was blanked, and so was reported already."""
    token = _token(error)
    if token.type != "ELSE":
        return False
    head = error_recovery.partner(error_recovery.mask_text(text), token.start_pos or 0)
    if head is None:
        return False
    line = source.span(head, head).line
    return not text.startswith(source.line(line), source.offset(line))


def _too_deep(parsed: Parsed) -> int | None:
    """The offset of the first node that is nested too deep for recursive visitors, if any."""
    waiting = [(parsed, 0)]
    while waiting:
        node, depth = waiting.pop()
        depth += node.data in _NESTING
        if depth > MAX_NESTING:
            return int(node.meta.start_pos)
        waiting += [(child, depth) for child in node.children if isinstance(child, _Tree)]
    return None


def _place(error: UnexpectedInput, source: Source) -> Span:
    start, token = error.pos_in_stream or 0, _token(error)
    end = start if token.type == "_NL" else token.end_pos or start + 1
    return source.span(start, min(end, len(source.text)))


def _token(error: UnexpectedInput) -> Token:
    """The token that is unexpected; an empty one, of no type, where the text is no token."""
    return error.token if isinstance(error, UnexpectedToken) else Token("", "")


def _lacks_brace(error: UnexpectedInput) -> bool:
    return (
        isinstance(error, UnexpectedToken)
        and error.token.type == "_NL"
        and "LBRACE" in (error.accepts or error.expected or ())
    )


def _blank(text: str, position: int, lonely: Collection[int] = (), *, head: bool = False) -> str:
    """The text, of the same length, without the statement with an error at a position; `lonely`
    braces can be dropped, and `head` means that it should have ended with a `{`.
    """
    shape = error_recovery.mask_text(text)
    start, end = error_recovery.statement(shape, position)
    kept = list(" " * (end - start))
    for brace in error_recovery.ends(shape, start, end):
        if brace in lonely:
            continue
        kept[brace - start] = shape[brace]
        if shape[brace] == "}" and brace + 1 < end:
            kept[brace - start + 1] = "\n"
    if head and kept:
        kept[-1] = "{"
    inner = "".join(kept)
    condition = _CONDITION.match(text, start, end)
    if condition and "{" in kept:  # kept without what is wrong with it
        whole = ("when 0 {" if condition[1] else "} else {").ljust(len(condition[0]))
        whole += text[condition.end() : end]
        if len(whole) == end - start and whole != text[start:end]:
            inner = whole
    if inner == text[start:end]:  # misplaced braces; each round must blank something
        inner = " " * (end - start)
    return text[:start] + inner + text[end:]
