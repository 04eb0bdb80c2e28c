"""The canonical layout of a plan, a function of its tokens and comments alone.

- Each statement, and each brace that ends a block, has a line of its own; blocks are indented by
  four spaces.
- In consecutive lines of one kind the `:` of rules, and the `=` of axes, options and lets, are
  aligned, except after heads of more than 50 characters.
- Comments after consecutive statements are aligned, four spaces after the longest line.
- A statement spans several lines only where it would pass column 100, or where there is a comment
  inside its brackets: then the widest brackets are broken first, one item per line.
- There is at most one blank line in a row, and none at the edges of a block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.syntax.formatter import tokens
from planc.syntax.parse import parse

WIDTH = 100
_INDENT = 4
_WIDEST = 50
_BEFORE_COMMENT = 4
_MANY = 50
_MODIFIERS = ("OPTIONAL", "OVERRIDE")


def format_plan(source: Source, sink: Sink) -> str | None:
    """A plan in its canonical layout, with its first line's ending, or None where it does not
    parse.

    Raises RuntimeError if that would change the plan: a bug of this module.
    """
    errors = sink.errors
    before = parse(source, sink)
    if sink.errors > errors:
        return None
    text = source.text.removeprefix("\ufeff")
    result = laid_out(text)
    if result == text:
        return text
    check = Sink()
    after = parse(Source(source.name, result), check)
    if check.has_errors or after != before or _comments(result) != _comments(text):
        raise RuntimeError(f"the canonical layout of {source.name} would change its meaning")
    first = text.find("\n")
    return result.replace("\n", "\r\n") if text[max(first - 1, 0) : first] == "\r" else result


def _comments(text: str) -> list[str]:
    """The comments of a text, unordered: a comment inside an expression moves above it."""
    return sorted(p.text for p in tokens.tokens_of(text + "\n") if p.kind == "#")


def laid_out(text: str) -> str:
    """A text that parses, in its canonical layout.

    Raises:
        UnexpectedInput: the text is not in the grammar.
    """
    rows: list[_Row] = []
    lines = tokens.TokenReader(tokens.tokens_of(text + "\n")).read()
    pads = _pads(lines)
    for at, line in enumerate(lines):
        blank = line.blank and at > 0 and not lines[at - 1].opens and not line.closes
        rendered = _render(line.parts, line.indent, pad=pads.get(at))
        rendered = rendered or [_Row(indent=line.indent, text="")]
        rendered[-1] = replace(rendered[-1], comment=line.comment)
        rendered[0] = replace(rendered[0], blank=blank)
        rows += rendered
    return "".join(_print_rows(rows))


# Columns ---------------------------------------------------------------------------------------


def _pads(lines: Sequence[tokens.OutputLine]) -> dict[int, tuple[int, int]]:
    runs: list[list[tuple[int, int, int]]] = []
    last: tuple[object, ...] | None = None
    for at, line in enumerate(lines):
        if not line.parts and not line.blank and last is not None:
            continue  # a comment between two rules does not part them
        separator = None if line.opens or line.closes else _separator(line)
        if separator is None:
            last = None
            continue
        kind, position = separator
        if line.blank or last != kind:
            runs.append([])
        last = kind
        if not tokens.contains_comments(line.parts[:position]):
            width = len(_flat(line.parts[:position]))
            if width <= _WIDEST:
                runs[-1].append((at, position, width))
    widest = ((run, max((width for _, _, width in run), default=0)) for run in runs)
    return {at: (position, most - w) for run, most in widest for at, position, w in run}


def _separator(line: tokens.OutputLine) -> tuple[tuple[object, ...], int] | None:
    """The kind of a line that has a head, and the index between the head and the rest."""
    kinds = [p.kind if isinstance(p, tokens.PlanToken) else "" for p in line.parts]
    if "COLON" in kinds:
        return ("COLON",), kinds.index("COLON")
    if "EQUAL" not in kinds:
        return None
    position = kinds.index("EQUAL")
    preceding = (k for k in kinds[: position - 1] if k not in _MODIFIERS)
    return ("EQUAL", *preceding), position


# Brackets --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A line of the result; without a text it is a comment on its own."""

    indent: int
    text: str
    comment: str | None = None
    blank: bool = False


def _render(
    parts: Sequence[tokens.TokenOrGroup],
    indent: int,
    *,
    pad: tuple[int, int] | None = None,
    end: str = "",
) -> list[_Row]:
    """The rows of a statement or an item: one where it fits, else with brackets broken."""
    if not parts:
        return []
    groups = [p for p in parts if isinstance(p, tokens.BracketGroup)]
    broken = [g for g in groups if g.has_comments]
    while True:
        rows = _rows(parts, indent, pad, broken)
        rows[-1] = replace(rows[-1], text=rows[-1].text + end)
        whole = [g for g in groups if g.items and g not in broken]
        if not whole or all(_INDENT * r.indent + len(r.text) <= WIDTH for r in rows):
            return rows
        widest = max(whole, key=lambda g: len(_flat([g])))
        broken += [widest] if len(groups) <= _MANY else whole


def _rows(
    parts: Sequence[tokens.TokenOrGroup],
    indent: int,
    pad: tuple[int, int] | None,
    broken: Sequence[tokens.BracketGroup],
) -> list[_Row]:
    rows: list[_Row] = []
    text = ""
    for at, part in enumerate(parts):
        if at > 0:
            text += _space(parts[at - 1], part)
        if pad is not None and pad[0] == at:
            text += " " * pad[1]
        if isinstance(part, tokens.PlanToken):
            text += part.text
        elif part not in broken:
            text += _flat([part])
        else:
            rows.append(_Row(indent=indent, text=text + part.open.text))
            rows += _item_rows(part, indent + 1)
            text = part.close.text
    return [*rows, _Row(indent=indent, text=text)]


def _item_rows(group: tokens.BracketGroup, indent: int) -> list[_Row]:
    rows: list[_Row] = []
    for item in group.items:
        rows += [_Row(indent=indent, text="", comment=c) for c in item.lead]
        rendered = _render(item.parts, indent, end="," if group.is_list else "")
        rendered[-1] = replace(rendered[-1], comment=item.trailing)
        rows += rendered
    return [*rows, *(_Row(indent=indent, text="", comment=c) for c in group.tail)]


# Text ------------------------------------------------------------------------------------------


def _flat(parts: Sequence[tokens.TokenOrGroup]) -> str:
    text = ""
    for before, part in zip([None, *parts], parts, strict=False):
        text += _space(before, part) if before is not None else ""
        if isinstance(part, tokens.PlanToken):
            text += part.text
        else:
            comma = ", " if part.is_list else " "
            text += part.open.text + comma.join(_flat(i.parts) for i in part.items)
            text += part.close.text
    return text


def _space(before: tokens.TokenOrGroup, part: tokens.TokenOrGroup) -> str:
    if isinstance(part, tokens.BracketGroup):
        tight = part.call
    else:
        tight = part.kind in ("COMMA", "CLASS", "RBRACE")
    return "" if tight or (isinstance(before, tokens.PlanToken) and before.unary) else " "


def _print_rows(rows: Sequence[_Row]) -> Iterable[str]:
    """The rows as text, with the comments after consecutive rows aligned."""
    columns: list[int] = [0] * len(rows)
    start = 0
    for at in range(1, len(rows) + 1):
        if at < len(rows) and _together(rows[at - 1], rows[at]):
            continue
        width = max(len(r.text) for r in rows[start:at])
        columns[start:at] = [width + _BEFORE_COMMENT] * (at - start)
        start = at
    for row, column in zip(rows, columns, strict=True):
        text = row.text
        if row.comment is not None:
            text = f"{text:<{column}}{row.comment}" if text else row.comment
        yield ("\n" if row.blank else "") + " " * (_INDENT * row.indent) + text + "\n"


def _together(first: _Row, second: _Row) -> bool:
    behind = all(r.text and r.comment is not None for r in (first, second))
    return behind and first.indent == second.indent and not second.blank
