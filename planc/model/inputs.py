"""What a small model is run on.

Rows of the batch are the outermost dim of every input, each row with as much as any other, so
that a rank of a data axis takes its part of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Inputs = dict[str, Any]
"""The arguments of forward by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the text that a model is run on.

    Args:
        rows: of the batch.
        length: of a row, in tokens; rows are as many times longer as images ask for.
        seed: of the tokens.
        ends: how many tokens at either end of the vocabulary stay out; 0 always does, for it
            often stands for padding.
    """

    rows: int = 4
    length: int = 16
    seed: int = 3
    ends: int = 0

    def text(self, vocabulary: int, least: int = 0) -> Inputs:
        """Random `input_ids` and `labels`, [rows, length].

        Args:
            vocabulary: the number of tokens there are.
            least: that a row must hold.
        """
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        high = max(self.ends + 1, vocabulary - self.ends)
        low = min(max(1, self.ends), high - 1)
        size = (self.rows, self.length * max(1, -(-least // self.length)))
        return {
            name: torch.randint(low, high, size, generator=generator)
            for name in ("input_ids", "labels")
        }


def part_of(inputs: Mapping[str, Any], rank: int, ranks: int) -> Inputs:
    """What one rank of a data axis reads.

    Args:
        inputs: of all ranks.
        rank: its number.
        ranks: how many there are; every input's outermost dim divides by it.
    """
    found: Inputs = {}
    for name, value in inputs.items():
        own = len(value) // ranks
        found[name] = value[rank * own : (rank + 1) * own]
    return found
