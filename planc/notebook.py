"""How a notebook shows what `planc.api` returns."""

from collections.abc import Callable
from typing import Any

DRAW: list[Callable[[Any], str]] = []
"""What draws a result; `planc.api` adds it, so that no result depends on pictures."""


class InNotebooks:
    """A base class of results."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return DRAW[0](self) if DRAW else None
