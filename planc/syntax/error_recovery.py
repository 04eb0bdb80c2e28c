"""Finds unmatched brackets in a text before it is parsed.

A parser notices a missing brace only at the end of the file, or at the first statement that is
invalid inside the block. The indentation shows where the block should have ended; it decides only
where a mistake is reported and how the rest is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

_BRACKET = re.compile(r"[{}()\[\]]")
_TEXT = re.compile(r'#[^\n]*|"(?:\\.|[^"\\\n])*"?')
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_STATEMENT = re.compile(r"\s*(override|plan|language|extend|option|let|require|style)\b|.*\{\s*$")
_SELECTOR_END = re.compile(r"\}[\w.*\[]")
_OPENERS = {")": "(", "]": "[", "}": "{"}


def mask_text(text: str) -> str:
    """The text with comments and strings blanked, for finding brackets."""
    return _TEXT.sub(lambda m: " " * len(m[0]), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclosed:
    """An opening bracket without a closing one: its offset, and where a block's `}` is assumed, the
    start of a line or the end of the text; None inside a statement.
    """

    start: int
    end: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    start: int
    indent: int
    block: bool


@dataclass(slots=True)
class Brackets:
    """The unmatched brackets of a masked text: openings in order, and offsets of closing ones."""

    text: str
    unclosed: list[Unclosed] = field(default_factory=list)
    lonely: set[int] = field(default_factory=set)
    _stack: list[_Open] = field(default_factory=list)

    def _lose(self, end: int) -> None:
        bracket = self._stack.pop()
        self.unclosed.append(Unclosed(start=bracket.start, end=end if bracket.block else None))

    def _close(self, position: int, line: int) -> None:
        opener = _OPENERS[self.text[position]]
        for depth in range(len(self._stack) - 1, -1, -1):
            opening = self.text[self._stack[depth].start]
            if opening == opener:
                while len(self._stack) > depth + 1:
                    self._lose(line)
                self._stack.pop()
                return
            if opening == "{":
                break
        self.lonely.add(position)

    def scan(self, ends: Collection[int] = (), *, indented: bool) -> Brackets:
        start = 0
        for line in self.text.split("\n"):
            for _ in range(list(ends).count(start)):
                if self._stack and self._stack[-1].block:
                    self._stack.pop()
            if indented and line.strip():
                # a block ends before a line that is indented no more than the block's head
                shift = line.lstrip().startswith("}")
                while self._stack and self._stack[-1].block:
                    if _indent(line) + shift > self._stack[-1].indent:
                        break
                    if len(self._stack) == 1 and not _STATEMENT.match(line):
                        break
                    self._lose(start)
            for match in _BRACKET.finditer(line):
                position = start + match.start()
                in_block = not self._stack or self._stack[-1].block
                if match[0] in "{([":
                    block = match[0] == "{" and _is_block(line, match.start())
                    self._stack.append(_Open(start=position, indent=_indent(line), block=block))
                elif in_block and _SELECTOR_END.match(line, match.start()):
                    self.lonely.add(position)
                else:
                    self._close(position, start)
            # the braces of a selector hold no spaces, so they can't go on in the next line
            while self._stack and self.text[self._stack[-1].start] == "{":
                if self._stack[-1].block:
                    break
                self._lose(start)
            start += len(line) + 1
        while self._stack:
            self._lose(len(self.text))
        self.unclosed.sort(key=lambda u: u.start)
        return self


def brackets(text: str, ends: Collection[int] = ()) -> Brackets:
    """The unmatched brackets of a text without strings; a `}` is assumed before `ends`."""
    plain = Brackets(text).scan(ends, indented=False)
    if not any(u.end is not None for u in plain.unclosed):
        return plain
    guess = Brackets(text).scan(ends, indented=True)
    agree = len(guess.unclosed) == len(plain.unclosed) and guess.lonely == plain.lonely
    return guess if agree else plain


def guess_unclosed(text: str) -> list[Unclosed]:
    """The blocks that are not closed by the indentation, whatever the number of braces."""
    return [u for u in Brackets(text).scan(indented=True).unclosed if u.end is not None]


def open_string(text: str, position: int) -> int | None:
    """The offset of an unmatched `"` on the line of a position, in the original text."""
    start, end = _lines(text, position, position)
    for match in _TEXT.finditer(text, start, end):
        if match[0][0] == '"' and not _STRING.fullmatch(match[0]):
            return match.start()
    return None


def partner(text: str, position: int) -> int | None:
    """The offset of the `{` that matches the last `}` before a position."""
    depth = 0
    for match in reversed(list(_BRACKET.finditer(text, 0, position))):
        depth += {"}": 1, "{": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "{":
            return match.start()
    return None


def ends(text: str, start: int, end: int) -> Iterator[int]:
    """The offsets of braces in [start, end) whose partner is outside that range."""
    open_: list[int] = []
    for match in _BRACKET.finditer(text, start, end):
        if match[0] == "{":
            open_.append(match.start())
        elif match[0] == "}" and open_:
            open_.pop()
        elif match[0] == "}" and not _SELECTOR_END.match(text, match.start()):
            yield match.start()
    for position in open_:
        first = text.rfind("\n", 0, position) + 1
        stop = text.find("\n", position)
        if _is_block(text[first : stop if stop >= 0 else len(text)], position - first):
            yield position


def statement(text: str, position: int) -> tuple[int, int]:
    """The lines [start, end) of a masked text that hold the statement at a position.

    A statement continues over the lines that its ( ) and [ ] span.
    """
    merged: list[tuple[int, int]] = []
    for first, last in _groups(text):
        start, end = _lines(text, first, last)
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    containing = (lines for lines in merged if lines[0] <= position <= lines[1])
    return next(containing, _lines(text, position, position))


def _lines(text: str, first: int, last: int) -> tuple[int, int]:
    end = text.find("\n", last)
    return text.rfind("\n", 0, first) + 1, end if end >= 0 else len(text)


def _groups(text: str) -> Iterator[tuple[int, int]]:
    """The outermost ( ) and [ ] with their closing brackets."""
    depth = braces = first = 0
    for match in _BRACKET.finditer(text):
        if match[0] in "([":
            if depth == 0:
                first, braces = match.start(), 0
            depth += 1
        elif match[0] in ")]":
            depth -= 1
            if depth == 0:
                yield first, match.start()
            depth = max(depth, 0)
        else:
            braces += 1 if match[0] == "{" else -1
            if braces < 0:  # the end of a block: the bracket was never closed
                depth = 0


def _indent(line: str) -> int:
    lead = line[: len(line) - len(line.lstrip())]
    return len(lead.expandtabs(4))


def _is_block(line: str, position: int) -> bool:
    """Whether a `{` opens a block, rather than the alternatives of a selector."""
    rest = line[position + 1 :]
    if not rest.strip() or rest[0].isspace():
        return True
    before = line[position - 1] if position else " "
    return (before.isspace() or before in ")]") and not re.match(r"\S*[,}]", rest)
