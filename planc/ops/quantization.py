"""Frozen weights in 4 bits, by bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from planc.model.facts import Modules
from planc.ops.base import Op, Some, choice

Float = Annotated[str, choice("float32", "bfloat16", "float16")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(Op):
    """bitsandbytes' `quantize_4bit` of each layer's weight, whose bytes become a column.

    Args:
        members: linear layers, as peft calls those that it is around (`base_layer`).
        kind: `nf4` or `fp4`.
        storage: the dtype that the bytes are seen as, a torch dtype's name.
        compute: what a product is computed in, None for the dtype of its input.
        double: whether scales are quantised too.
        block: the weights that share a scale.
    """

    members: Some[Modules]
    kind: Annotated[str, choice("nf4", "fp4")]
    storage: Float
    compute: Float | None = None
    double: bool = False
    block: Annotated[int, choice(*(2**i for i in range(5, 13)))] = 64
