"""Sets of list indices, as small as one integer for lists of any length.

A repeated block of a model is one entry with a set of indices, so later stages do not grow with
the depth of the model: a set of 1,024 layers is one integer of 1,024 bits, and union, intersection
and difference are one operation each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MOST = 1_000_000  # larger than any model; limits the memory for untrusted text


@dataclass(frozen=True, slots=True)
class Indices:
    """A set of non-negative indices, as a bit mask."""

    bits: int

    @staticmethod
    def from_numbers(indices: Iterable[int]) -> Indices:
        bits = 0
        for index in indices:
            bits |= 1 << index
        return Indices(bits)

    @staticmethod
    def all(length: int) -> Indices:
        return Indices((1 << length) - 1)

    def __and__(self, other: Indices) -> Indices:
        return Indices(self.bits & other.bits)

    def __or__(self, other: Indices) -> Indices:
        return Indices(self.bits | other.bits)

    def __sub__(self, other: Indices) -> Indices:
        return Indices(self.bits & ~other.bits)

    def __bool__(self) -> bool:
        return self.bits != 0

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __contains__(self, index: int) -> bool:
        return bool(self.bits >> index & 1)

    def __iter__(self) -> Iterator[int]:
        if self._consecutive:
            yield from range(self.first, self.last + 1)
            return
        bits = self.bits
        while bits:
            low = bits & -bits
            yield low.bit_length() - 1
            bits ^= low

    @property
    def _consecutive(self) -> bool:
        """Whether the set is one run without gaps: adding its lowest bit carries through it."""
        return self.bits != 0 and self.bits + (self.bits & -self.bits) & self.bits == 0

    @property
    def first(self) -> int:
        return (self.bits & -self.bits).bit_length() - 1

    @property
    def last(self) -> int:
        return self.bits.bit_length() - 1

    def runs(self) -> tuple[range, ...]:
        """The set as few ranges, in order. Ranges are found greedily; each has one step."""
        if self._consecutive:
            return (range(self.first, self.last + 1),)
        rest = list(self)
        runs = []
        while rest:
            step = rest[1] - rest[0] if len(rest) > 1 else 1
            length = 1
            while length < len(rest) and rest[length] - rest[length - 1] == step:
                length += 1
            if length == 2 and step > 1:  # two indices do not make a pattern
                length = 1
            if length == 1:
                step = 1
            runs.append(range(rest[0], rest[length - 1] + 1, step))
            rest = rest[length:]
        return tuple(runs)

    def __str__(self) -> str:
        """The set in the syntax of a selector: `[0:32]`, `[31]`, `[0:32:2]`, `[0:3,5]`."""
        return f"[{','.join(_slice(r) for r in self.runs())}]"

    @staticmethod
    def parse(text: str) -> Indices:
        """The inverse of `str`, for texts such as `[0:32]`. Both ends are present and not negative.

        Raises:
            ValueError: the text is not of that form.
        """
        result = Indices(0)
        for part in text.removeprefix("[").removesuffix("]").split(","):
            numbers = [int(n) for n in part.split(":")]
            if any(not 0 <= n <= _MOST for n in numbers) or len(numbers) > 3:
                raise ValueError(f"not a set of indices: {text}")
            span = range(numbers[0], numbers[0] + 1) if len(numbers) == 1 else range(*numbers)
            result |= (
                Indices.all(span.stop) - Indices.all(span.start)
                if span.step == 1
                else (Indices.from_numbers(span))
            )
        return result


def _slice(run: range) -> str:
    if len(run) == 1:
        return str(run.start)
    return f"{run.start}:{run.stop}" + (f":{run.step}" if run.step > 1 else "")
