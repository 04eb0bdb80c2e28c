"""Records the memory of a rank as changes by kind: the most of each moment, and its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

Held = dict[str, int]
"""Bytes by what they are."""


class Ledger:
    """Blocks of memory that are made, change their size and are freed, in order.

    Attributes:
        names: of blocks, by their number.
        events: the number of a block, and by how many bytes it changes.
        marks: the moments, in order: a name, and the number of events before it.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[str, int]] = []

    def mark(self, moment: str) -> None:
        """From here on, what is held belongs to another moment."""
        self.marks.append((moment, len(self.events)))

    def add_block(self, name: str) -> int:
        """The number of a new block, which has no bytes yet."""
        self.names.append(name)
        return len(self.names) - 1

    def moments(self) -> Iterator[tuple[str, Held]]:
        """For each moment its name, and what was held when most was held in it."""
        held: Counter[int] = Counter()
        ends = [*(at for _, at in self.marks[1:]), len(self.events)]
        for number, size in self.events[: self.marks[0][1]]:
            held[number] += size
        for (name, start), end in zip(self.marks, ends, strict=True):
            total = peak = 0
            last = start
            for at in range(start, end):
                total += self.events[at][1]
                if total > peak:
                    peak, last = total, at + 1
            for number, size in self.events[start:last]:
                held[number] += size
            yield name, self._by_name(held)
            for number, size in self.events[last:end]:
                held[number] += size

    def _by_name(self, held: Counter[int]) -> Held:
        sizes: Counter[str] = Counter()
        for number, size in held.items():
            sizes[self.names[number]] += size
        return {name: size for name, size in sizes.items() if size}
