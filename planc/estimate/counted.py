"""What one forward of each kind of layer computed and kept, as plain data.

`kept_tensors` counts it on fake tensors for one batch and no parallelism; `from_plan` scales it by
what the plan's tensor-parallel rules split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class MicroBatch(NamedTuple):
    """A micro-batch of one rank, whose forward is counted.

    Args:
        rows, tokens: of its input.
        dtype: of parameters and activations, such as `bfloat16`.
        exchange: what attention exchanges between parts of a sequence, how many there are, and
            how many ranks exchange heads for tokens, where not all do.
        states: what is exchanged of states, `state` or `gather`, and in how many runs of tokens a
            rank has its part; empty where none go on.
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
