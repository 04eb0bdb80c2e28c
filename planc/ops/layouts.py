"""Layouts of activations, with torch's names."""

import re
from dataclasses import dataclass, replace
from typing import Annotated

from planc.ops.base import text


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True)
class Shard:
    """Sharded along `dim`; negative dims count from the end."""

    dim: int

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds one addend of a pending sum."""

    def __str__(self) -> str:
        return "partial"


def _layout(text: str) -> Replicate | Shard | Partial:
    match = re.fullmatch(r"shard\((.*)\)", text)
    return Shard(int(match[1])) if match else Partial() if text == "partial" else Replicate()


Layout = Annotated[
    Replicate | Shard | Partial,
    replace(
        text("layout", "a layout", r"(replicate|partial|shard\((0|-?[1-9][0-9]?)\))"),
        write=str,
        read=_layout,
    ),
]
