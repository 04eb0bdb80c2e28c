"""What one forward of each kind of layer computed and kept, as plain data; for many batches, from
counts for a few of them.

`kept_tensors` counts it on fake tensors for one batch and no parallelism; `from_plan` scales it by
what the plan's tensor-parallel rules split. All that is counted is a constant and a multiple of the
rows, from two rows on: torch copies less where a dim has one entry. Where ranks have parts of
sequences and see the keys of all, it is the same of the tokens of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple


class MicroBatch(NamedTuple):
    """A micro-batch of one rank, whose forward is counted.

    Args:
        rows, tokens: of its input.
        dtype: of parameters and activations, such as `bfloat16`.
        exchange: what attention exchanges between parts of a sequence, and how many there are.
    """

    rows: int
    tokens: int
    dtype: str
    exchange: tuple[str, int] = ("", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor that autograd keeps until backward.

    Args:
        module: the name of the innermost module whose forward kept it, below its layer.
        size: bytes of its storage.
    """

    module: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`count` matmuls of an (m, k) and a (k, n) matrix in a module.

    Args:
        divided: whether they divide the m rows among them, as experts do.
    """

    module: str
    m: int
    n: int
    k: int
    count: int = 1
    divided: bool = False

    @property
    def rows(self) -> int:
        """The rows of the first matrix of each product, in the mean."""
        return -(-self.m // self.count) if self.divided else self.m


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """A flash kernel in a module, or one of linear attention: as many `keys` for each query as have
    its FLOPs.
    """

    module: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    linear: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that one memory-bound kernel of a module reads and writes."""

    module: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """All of one layer, or of what is outside every layer.

    Args:
        at: the torch name of the layer, empty for what is outside.
        like: the torch names of all layers of the real model that it stands for.
        boundary: bytes of the layer's input.
    """

    at: str
    like: tuple[str, ...]
    boundary: int = 0
    saved: tuple[Saved, ...] = ()
    products: tuple[Product, ...] = ()
    attended: tuple[Attended, ...] = ()
    moved: tuple[Moved, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """
    Args:
        parts: one for each kind of layer, then the rest.
        logits: elements of the output that the loss reads.
    """

    parts: tuple[Part, ...]
    logits: int

    def document(self) -> dict[str, Any]:
        """As plain data, for the cache."""
        return asdict(self)

    @staticmethod
    def of(data: Mapping[str, Any]) -> Counted:
        """The reverse of `document`."""
        kinds = {"saved": Saved, "products": Product, "attended": Attended, "moved": Moved}

        def part(fields: Mapping[str, Any]) -> Part:
            lists = {n: tuple(k(**x) for x in fields[n]) for n, k in kinds.items()}
            return Part(**{**fields, **lists, "like": tuple(fields["like"])})

        return Counted(parts=tuple(part(p) for p in data["parts"]), logits=data["logits"])


_ENDS = (2, 4)
"""The rows, and the parts of a sequence, between and beyond which counts are on a line."""


@dataclass(slots=True)
class DerivedCounts:
    """The counts of jobs, each known once; `run` counts a job, as `kept_tensors.count`."""

    run: Callable[[MicroBatch], Counted | None]
    _counted: dict[MicroBatch, Counted | None] = field(default_factory=dict)
    _derived: dict[MicroBatch, Counted | None] = field(default_factory=dict)

    def counted(self, job: MicroBatch) -> Counted | None:
        """The count of a job; None where it cannot be counted."""
        if job not in self._counted:
            self._counted[job] = self.run(job)
        return self._counted[job]

    def derived(self, job: MicroBatch) -> Counted | None:
        """The same, by arithmetic where the counts for other batches are enough."""
        if job not in self._derived:
            self._derived[job] = self._on_line(job) or self.counted(job)
        return self._derived[job]

    def _on_line(self, job: MicroBatch) -> Counted | None:
        """The count that follows from those for two other numbers of rows, or of parts."""
        (kind, parts), total = job.exchange, job.tokens * job.exchange[1]
        if job.rows not in (1, *_ENDS):
            ends = [job._replace(rows=rows) for rows in _ENDS]
            share = Fraction(job.rows - _ENDS[0], _ENDS[1] - _ENDS[0])
        elif kind == "all_gather" and parts not in _ENDS and not total % _ENDS[1]:
            ends = [job._replace(tokens=total // n, exchange=(kind, n)) for n in _ENDS]
            share = Fraction(job.tokens - ends[0].tokens, ends[1].tokens - ends[0].tokens)
        else:
            return None
        one, two = map(self.derived, ends)
        if one and two:
            with suppress(ValueError):
                return Counted.of(_between(one.document(), two.document(), share))
        return None


def _between(one: Any, two: Any, share: Fraction) -> Any:
    """Plain data, each of whose numbers is that share of the way from the one to the other.

    Raises:
        ValueError: they differ in more than numbers, or one is not a whole number.
    """
    if type(one) is int:
        made = one + (two - one) * share
        if made.denominator == 1:
            return int(made)
    elif isinstance(one, dict):
        return {key: _between(one[key], two[key], share) for key in one}
    elif isinstance(one, list | tuple):
        return [_between(a, b, share) for a, b in zip(one, two, strict=True)]
    elif one == two:
        return one
    raise ValueError("the counts differ in more than numbers, or are no multiples")
