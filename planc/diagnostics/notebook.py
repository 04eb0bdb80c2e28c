"""Shows results of the Python API in `print` and in notebooks."""

from collections.abc import Callable
from typing import Any

DRAW: list[Callable[[Any], str]] = []
"""The function that draws a result; `planc.answers` adds it, so results do not import pictures."""
TEXT: list[Callable[[Any], str]] = []
"""The function that writes a result as the terminal shows it, added in the same way."""


class InNotebooks:
    """A base class of results."""

    __slots__ = ()

    def __str__(self) -> str:
        return TEXT[0](self) if TEXT else repr(self)

    def _repr_html_(self) -> str | None:
        return DRAW[0](self) if DRAW else None
