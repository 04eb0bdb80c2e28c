"""The arguments of a shell script or an argument file -> keys, by the shell's rules for words.

No command runs. Variables are replaced by the values that the script assigns to them.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

from planc.tools.importers.peer import ConfigKey

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\\\n|\#[^\n]*)|(?P<operator>[\n;&|()<>])|(?P<word>(?:
        \\. | '[^']*' | "(?:\\.|[^"\\])*" | `[^`]*`
        | \$\([^()]*(?:\([^()]*\)[^()]*)*\) | \$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}
        | [^\s;&|()<>'"\\`] )+)""",
    re.DOTALL | re.VERBOSE,
)
"""A blank or a comment, an operator, or a word. A `#` inside a word begins no comment."""
_PART = re.compile(
    r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)
    |((?:\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|[^'"\\])+|.)""",
    re.DOTALL | re.VERBOSE,
)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-=])([^{}]*))?\}|\$(\w+)")
_DECLARE = ("export", "declare", "local", "readonly", "typeset", "env", ":")
_BEGIN, _END = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
_CONTINUE = (*_BEGIN, *_END, "then", "else", "elif", "do", "{", "}", "!", "in")
_MAX_EXPANDED = 1_000_000
_SEPARATE = re.compile(r"(^|\s)[\"']?--[A-Za-z]|\.py$|\[[@*]\]|ARGS\b")


class ShellReader:
    """Reads the arguments `--name value` of one script.

    Args:
        lines: whether each line is a command, as in a script; else a line is one more blank, as
            in a file of arguments.

    Attributes:
        values: the value of each variable at the current line; `$NAME` where branches of the
            script assign different values.
        expanded: the number of characters that variables were replaced by.
    """

    def __init__(self, lines: bool) -> None:
        self.lines = lines
        self.values: dict[str, str] = {}
        self.expanded = 0

    def read(self, text: str, line: int = 1, *, array: bool = False) -> Iterator[ConfigKey]:
        """Yields the exported variables and the arguments of a text.

        Args:
            line: the line of the script that the text begins in.
            array: whether the text is a list of words, whose lines do not end a command.
        """
        command: list[tuple[str, int]] = []
        depth, operator, opened = 0, "\n", 0
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            end = token.end() if token else at + 1
            number = line + text.count("\n", 0, at)
            word = token["word"] if token else None
            sign = token["operator"] if token else None
            at = end
            if word and not command and not array and word in _CONTINUE:
                depth += (word in _BEGIN) - (word in _END)
            elif word:
                command.append((word, number))
            elif sign == "(" and command and command[-1][0].endswith("="):
                opened, at = at, _closing_position(text, at)
                yield from self.read(text[opened : at - 1], number, array=True)
            elif sign and not (sign == "\n" and (array or not self.lines)):
                yield from self._command(command, depth > 0 or operator in "&|")
                command, operator = [], sign
        yield from self._command(command, depth > 0 or operator in "&|")

    def _command(self, words: list[tuple[str, int]], conditional: bool) -> Iterator[ConfigKey]:
        """Yields the keys of one command, after its assignments."""
        at, declared = 0, ""
        while at < len(words):
            word, number = words[at]
            if word in _DECLARE:
                declared = word
            elif declared == ":":
                self.expand(word)
            elif assigned := _ASSIGNED.fullmatch(word):
                yield from self._assign(assigned, number, declared == "export", conditional)
            elif not (declared and word.startswith("-") and not word.startswith("--")):
                break
            at += 1
        while at < len(words):
            word, number = words[at]
            at += 1
            if not re.match(r"""["']?--[A-Za-z]""", word) or re.search(r"\s", word):
                if re.search(r"(^|[\s'\"])--[A-Za-z]", word):  # `bash -c "torchrun --name value"`
                    yield from self.read(self.expand(word), number)
                continue
            name, equals, value = self.expand(word).partition("=")
            values = [value] if equals else []
            while not equals and at < len(words) and not _SEPARATE.search(words[at][0]):
                if not self.lines and values and words[at][1] != words[at - 1][1]:
                    break
                raw = words[at][0]
                values += self.expand(raw).split() if raw.startswith("$") else [self.expand(raw)]
                at += 1
            given: Any = True if not values else values[0] if len(values) == 1 else values
            yield ConfigKey(path=name[2:], value=_scalar(given), line=number)

    def _assign(
        self, assigned: re.Match[str], number: int, exported: bool, conditional: bool
    ) -> Iterator[ConfigKey]:
        """Assigns a variable; a text of arguments is read where it is assigned."""
        name, added, raw = assigned.groups()
        value = self.expand(raw)
        if re.search(r"(^|\s)--[A-Za-z]", value):
            yield from self.read(value, number, array=True)
            return
        value = self.values.get(name, "") + value if added else value
        if conditional and self.values.get(name, value) != value:
            value = f"${name}"  # which branch runs is not known
        self.values[name] = value
        if exported:
            yield ConfigKey(path=f"export {name}", value=value, line=number)

    def expand(self, word: str) -> str:
        """The word without its quotes, with the values of variables outside of single quotes."""
        parts = []
        for single, double, escaped, bare in _PART.findall(word):
            plain = self._expand(re.sub(r'\\([$`"\\])', r"\1", double) if double else bare)
            parts.append(single or escaped or plain)
        return "".join(parts)

    def _expand(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name, sign, default = match[1] or match[4], match[2], (match[3] or "").strip("\"'")
            known = self.values.get(name)
            if sign and (known is None or (not known and sign[0] == ":")):
                known = self._expand(default)
                if sign[-1] == "=":
                    self.values[name] = known
            if known is None:
                return match[0]
            self.expanded += len(known)
            if self.expanded > _MAX_EXPANDED:
                raise ValueError(f"its variables expand to more than {_MAX_EXPANDED:,} characters")
            return known

        return _VARIABLE.sub(value, text)


def _closing_position(text: str, at: int) -> int:
    """The position after the parenthesis that closes the one before `at`."""
    while at < len(text):
        token = _TOKEN.match(text, at)
        at = token.end() if token else at + 1
        if token and token["operator"] == ")":
            return at
    return len(text) + 1


def _scalar(value: Any) -> Any:
    """The number that a word of a command line stands for, else the word."""
    if not isinstance(value, str):
        return value
    try:
        number = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
    return number if isinstance(number, int | float) else value
