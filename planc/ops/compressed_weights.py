"""Frozen weights that are stored in fewer bits, as stages ask an operation about them."""

from collections.abc import Iterator
from typing import ClassVar, Protocol, Self, runtime_checkable

from planc.model.facts import Modules


@runtime_checkable
class CompressedWeights(Protocol):
    """An operation that compresses the frozen weights of layers with adapters.

    Attributes:
        TITLE: the weights in messages, as a plural.
        LAYER: the class of a layer with such a weight.
        members: the layers.
        storage: the torch dtype in which a weight is stored, as one column; empty if no line
            states it.
    """

    TITLE: ClassVar[str]
    LAYER: ClassVar[str]

    @property
    def members(self) -> tuple[Modules, ...]: ...
    @property
    def storage(self) -> str: ...
    def with_storage(self, dtype: str) -> Self:
        """The operation with another dtype of storage."""

    def range_problems(self) -> Iterator[tuple[str, str]]:
        """Yields each argument of a plan that is out of range, and a message."""

    def column_length(self, numel: int) -> int:
        """The length of the column in which a weight is stored."""

    def scale_bytes(self, numel: int, ranks: int) -> int:
        """The bytes of the scales on a rank that has an equal part of a weight."""
