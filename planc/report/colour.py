"""Colours of a terminal, and whether to use them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BOLD, RED, YELLOW, BLUE, CYAN, DIM = "1", "1;31", "1;33", "1;34", "36", "2"


def paint(text: str, code: str, on: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if on and text else text


def wants_colour(stream: Any, environ: Mapping[str, str]) -> bool:
    """Whether output to a stream is to be coloured: https://no-color.org, then FORCE_COLOR."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR") or environ.get("CLICOLOR_FORCE", "0") != "0":
        return True
    return bool(stream.isatty()) and environ.get("TERM") != "dumb"


def visible(text: str) -> str:
    """A text of a user's file, safe for a terminal: control characters are shown, not sent.

    Bidirectional overrides too, which would show a line in another order than it is read in.
    """
    text = text.replace("\t", "    ")
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
        lambda m: f"<U+{ord(m[0]):04X}>",
        text,
    )
