"""Text as a terminal displays it: how each character is shown, and its width in cells.

Plans, paths and model configurations are untrusted: control characters and characters that change
the reading order are replaced by visible ones.
"""

import re

TAB = "    "
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_SPLIT = re.compile(r"[ \t]*[^ \t]+")


def cell(char: str) -> tuple[str, int]:
    """The text that shows a character, and its width in cells; 0 if it joins the previous one."""
    if " " <= char <= "~":
        return char, 1
    if char == "\t":
        return TAB, len(TAB)
    import unicodedata

    category = unicodedata.category(char)
    if category in _HIDDEN:
        shown = _escape(char)
        return shown, len(shown)
    if category in ("Mn", "Me"):
        return char, 0
    return char, 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cells(text: str) -> list[tuple[str, int]]:
    """`cell` for each character; a combining character at the start gets a dotted circle."""
    out = [cell(char) for char in text]
    if out and out[0][1] == 0:
        out[0] = ("\u25cc" + out[0][0], 1)
    return out


def visible(text: str) -> str:
    """The text with all control characters, newlines included, made visible."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(shown for shown, _ in cells(text))


def visible_lines(text: str) -> str:
    """`visible` for each line of a text."""
    return "\n".join(map(visible, text.split("\n")))


def width(text: str) -> int:
    """The width in cells of a text without newlines, after `visible`."""
    return sum(size for _, size in cells(text))


def wrap(text: str, room: int) -> list[str]:
    """The visible text in lines of at most `room` cells; a line that fits is unchanged."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        shown = visible(paragraph)
        if width(shown) <= room:
            lines.append(shown)
        else:
            lines += _fill(shown, max(room, 1))
    return lines


def _fill(paragraph: str, room: int) -> list[str]:
    lines: list[str] = []
    line, used = "", 0
    for piece in _SPLIT.findall(paragraph):
        word = piece
        if line and used + width(word) > room:
            lines.append(line)
            line, used, word = "", 0, word.lstrip()
        if width(word) > room:
            *full, word = _cut(word, room)
            lines += full
        line, used = line + word, used + width(word)
    return [*lines, line] if line else lines


def _cut(word: str, room: int) -> list[str]:
    """A word in pieces that fit, each of at least one character and as long as can be."""
    starts, used = [0], 0
    for index, (_, size) in enumerate(cells(word)):
        if used + size > room and index > starts[-1]:
            starts.append(index)
            used = size or 1  # one that joins the previous is shown on a circle
        else:
            used += size
    return [word[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode control pictures
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"
