"""Counts of the work and the kept tensors of one forward of each kind of layer, as plain data.

`kept_tensors` counts it on fake tensors for one batch and no parallelism; `from_plan` scales it by
what the plan's tensor-parallel rules split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple


class MicroBatch(NamedTuple):
    """A micro-batch of one rank, whose forward is counted.

    Args:
        rows, tokens: of its input.
        dtype: of parameters and activations, such as `bfloat16`.
        exchange: how attention communicates between sequence shards, the number of shards, and the
            number of ranks of a Ulysses all-to-all, if it is fewer.
        states: how recurrent states are exchanged, `state` or `gather`, and the number of chunks
            in which a rank holds its tokens; empty if there are none.
        kernels: whether states are computed by the kernels of fla and mamba_ssm, or by the torch
            operators that transformers has in their place.
    """

    rows: int
    tokens: int
    dtype: str
    exchange: tuple[str, int, int] = ("", 1, 1)
    states: tuple[str, int] = ("", 1)
    kernels: bool = True


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
        joined: whether it is one kernel with the product before, whose input it has.
    """

    module: str
    m: int
    n: int
    k: int
    count: int = 1
    divided: bool = False
    joined: bool = False

    @property
    def rows(self) -> int:
        """The rows of the first matrix of each product, in the mean."""
        return -(-self.m // self.count) if self.divided else self.m


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """A flash kernel in a module, or one of linear attention: as many `keys` for each query as have
    its FLOPs.

    Args:
        causal: whether the causal half would do: with a flag, or with a mask.
        masked: whether it computes all keys: with a mask, or without a flag.
    """

    module: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    linear: bool = False
    causal: bool = True
    masked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that one memory-bound kernel of a module reads and writes."""

    module: str
    size: int


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def bytes_moved(self) -> Mapping[str, int]:
        """The bytes that one forward pass reads and writes, by module."""
        return _sums(self.moved)

    @cached_property
    def bytes_saved(self) -> Mapping[str, int]:
        """The bytes that one forward pass saves for backward, by module."""
        return _sums(self.saved)

    @cached_property
    def largest_saved(self) -> Mapping[str, int]:
        """The bytes of the largest tensor that each module keeps."""
        return {s.module: s.size for s in sorted(self.saved, key=lambda one: one.size)}


def _sums(some: Iterable[Moved | Saved]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in some:
        found[one.module] = found.get(one.module, 0) + one.size
    return found


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
        """Returns plain data, for the cache."""
        return asdict(self)

    @staticmethod
    def from_document(data: Mapping[str, Any]) -> Counted:
        """The reverse of `document`."""
        kinds = {"saved": Saved, "products": Product, "attended": Attended, "moved": Moved}

        def part(fields: Mapping[str, Any]) -> Part:
            lists = {n: tuple(k(**x) for x in fields[n]) for n, k in kinds.items()}
            return Part(**{**fields, **lists, "like": tuple(fields["like"])})

        return Counted(parts=tuple(part(p) for p in data["parts"]), logits=data["logits"])


Count = Callable[[MicroBatch], Counted | None]
"""A function that counts a micro-batch; it returns None if it cannot."""


def by_rows(count: Count) -> Count:
    """Counts with `count`, of batches that differ by their rows alone two with several rows: with
    the rows grows each number by the same, and the others are on the line. One row is apart: it
    needs no copies where several rows do.
    """
    known: dict[MicroBatch, Counted | None] = {}
    several: dict[MicroBatch, list[tuple[int, Any]]] = {}

    def count_or_interpolate(job: MicroBatch) -> Counted | None:
        if job in known:
            return known[job]
        alike = several.setdefault(job._replace(rows=0), [])
        found = None
        if job.rows > 1 and len(alike) > 1:
            (one, first), (two, second) = alike[:2]
            with suppress(ValueError):
                data = _on_a_line(first, second, job.rows - one, two - one)
                found = Counted.from_document(data)
        if found is None and (found := count(job)) and job.rows > 1:
            alike.append((job.rows, found.document()))
        known[job] = found
        return found

    return count_or_interpolate


def _on_a_line(first: Any, second: Any, at: int, distance: int) -> Any:
    """Numbers in plain data, `at` beyond the first ones, where the second are `distance` beyond.

    Raises:
        ValueError: the data have other parts, or a number would be no integer.
    """
    if isinstance(first, dict):
        if first.keys() == second.keys():
            return {n: _on_a_line(one, second[n], at, distance) for n, one in first.items()}
    elif isinstance(first, list | tuple):
        pairs = zip(first, second, strict=True)
        return [_on_a_line(one, two, at, distance) for one, two in pairs]
    elif first == second:
        return first
    elif type(first) is type(second) is int:
        more, over = divmod((second - first) * at, distance)
        if not over:
            return first + more
    raise ValueError("the counts are on no line")
