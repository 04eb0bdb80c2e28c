"""The number formats of matrix products that a section rounds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planc.ir.nodes import Plan
from planc.model.facts import Modules
from planc.sections import Hook


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """A format of one byte for the operands of products.

    Args:
        recipe: by which a hardware profile states the TFLOP/s of large products.
        casts: bytes read and written to round an element of an input in the forward pass, of an
            input in the backward pass, of a weight in each, and of a gradient.
    """

    recipe: str
    casts: tuple[int, int, int, int, int]


_FORMATS = Hook[Callable[[Plan], Iterator[tuple[Modules, NumberFormat]]]]("estimate", "formats")


def formats(plan: Plan) -> list[tuple[Modules, NumberFormat]]:
    """The modules whose products have rounded operands, with the formats."""
    return [pair for formats_of in _FORMATS.find_all(plan.sections) for pair in formats_of(plan)]
