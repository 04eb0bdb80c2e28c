"""Expressions for the sizes of the parts of a fused projection, which hold at every size."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from planc.model.facts import Facts, Module
from planc.tools.init.roles import Linear

_COUNT = re.compile(r"head|kv|group|(^|_)(n_?)?[qhk](_|$)", re.I)
_SIZE = re.compile(r"dim|size|width|hd|(^|_)d(_|$)", re.I)
_OTHER = re.compile(r"layer|depth|vocab|block|len|seq|pos|seed|rank|expert", re.I)
"""Patterns of names for numbers of heads, for sizes of features, and for other numbers."""


@dataclass(frozen=True, slots=True)
class PartSizes:
    """The integers by which a plan can state sizes: of the parent module, and the configuration.

    Args:
        values: by the names that a plan has for them.
        divided: the names of those that the plan divides over the ranks.
    """

    values: dict[str, int]
    divided: Collection[str] = ()

    @classmethod
    def from_facts(cls, facts: Facts, parent: Module | None, divided: Collection[str]) -> PartSizes:
        attributes = parent.facts if parent else ()
        stated = ((n, v) for n, v in facts.config.items() if type(v) is int and v > 0)
        values = {f"parent.{name}": value for name, value in attributes}
        values |= {f"config.{name}": value for name, value in stated if not _OTHER.search(name)}
        return cls(values, {f"parent.{name}" for name in divided})

    def expressions(self, linear: Linear) -> list[str]:
        """An expression for each part of a projection; none if one of them has no expression."""
        heads = self._count(linear.counts[0]) if linear.counts else ""
        expressions = [
            self._part(part, count, heads)
            for part, count in zip(linear.parts, linear.counts, strict=True)
        ]
        return expressions if all(expressions) else []

    def _part(self, part: int, count: int, heads: str) -> str:
        """The number of heads times the size of one, else the number of all features."""
        size = part // count if count else 0
        number, size_name = self._count(count), self._size(size)
        if number and size_name:
            return f"{number} * {size_name}"
        all_heads = self._size(self.values[heads] * size) if heads and size else ""
        if number and all_heads:
            of_each = f"{all_heads} // {heads}"
            return all_heads if number == heads else f"{number} * {of_each}"
        return self._size(part)

    def _count(self, value: int) -> str:
        names = [n for n, v in self.values.items() if v == value]
        names.sort(key=lambda name: (name not in self.divided, not _COUNT.search(name)))
        return names[0] if names else ""

    def _size(self, value: int) -> str:
        names = [n for n, v in self.values.items() if v == value]
        names.sort(key=lambda name: (not _SIZE.search(name), name in self.divided))
        return names[0] if names else ""
