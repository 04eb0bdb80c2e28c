"""Terminal colors: when to use them, and their ANSI codes."""

from collections.abc import Iterable, Mapping

StyledText = tuple[str, str]
"""A text and the name of its style; `""` is plain."""

_CODES = {
    "error": "1;31",
    "warning": "1;33",
    "info": "1;34",
    "secondary": "34",
    "gutter": "34",
    "bold": "1",
    "code": "36",
    "added": "32",
    "removed": "31",
    "changed": "33",
}


def wants_color(stream: object, environ: Mapping[str, str]) -> bool:
    """Whether text written to a stream may contain colors.

    Args:
        stream: a file; one without `isatty` is not a terminal.
        environ: the environment. `NO_COLOR` (https://no-color.org) takes precedence over
            `FORCE_COLOR` and `CLICOLOR_FORCE`, and these over the kind of stream.
    """
    if environ.get("NO_COLOR"):
        return False
    if any(environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    if environ.get("TERM") == "dumb":
        return False
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty())


def paint(segments: Iterable[StyledText], color: bool) -> str:
    """One line of text with ANSI codes and without trailing spaces."""
    pieces = list(segments)
    while pieces and not pieces[-1][0].strip(" "):
        pieces.pop()
    if pieces:
        pieces[-1] = (pieces[-1][0].rstrip(" "), pieces[-1][1])
    return "".join(
        f"\x1b[{_CODES[style]}m{text}\x1b[0m" if color and style and text else text
        for text, style in pieces
    )
