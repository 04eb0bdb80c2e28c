"""`fully_shard`, and what is set on its units afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from planc.model.facts import Modules
from planc.ops.base import (
    OMIT,
    Axes,
    Axis,
    Count,
    Dtype,
    Form,
    Op,
    Positive,
    ShardDim,
    Size,
    Some,
    Where,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Parameters in and below modules that lie otherwise than the rest of their unit."""

    modules: Modules
    shard: Some[Axis]
    replicate: Axes = field(default=(), metadata=OMIT)
    shard_dim: ShardDim = field(default=0, metadata=OMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard(Op):
    """`fully_shard`: one unit per module of `members[0]`, or one for a group.

    Args:
        shard: axes over which parameters are split; several are flattened to one dimension. None
            means torch's composable `replicate`.
        replicate: axes over which they are copied.
        reshard: `reshard_after_forward`.
        param, reduce, output: dtype names of the mixed precision policy, None for none.
        cast_inputs: the policy's `cast_forward_inputs`.
        nbytes: bytes of parameters that one rank keeps of one such unit, at rest.
        gathered: bytes of one such unit while it is gathered (in `param` precision).
        ignored: modules inside whose parameters stay whole and belong to no unit.
        shard_dim: the dim that is split of those parameters that have it, where it divides.
        offload: whether shards live in host memory.
        pin: whether that memory is pinned, where there is a device to copy to.
        spreads: parameters inside that lie otherwise, outer modules before inner.
    """

    members: Some[Modules]
    group: bool = False
    shard: Axes
    replicate: Axes = ()
    reshard: bool | Size
    param: Dtype | None = None
    reduce: Dtype | None = None
    output: Dtype | None = None
    cast_inputs: bool = True
    nbytes: Count = 0
    gathered: Count = 0
    ignored: tuple[Modules, ...] = field(default=(), metadata=OMIT)
    shard_dim: ShardDim = field(default=0, metadata=OMIT)
    offload: bool = field(default=False, metadata=OMIT)
    pin: bool = field(default=False, metadata=OMIT)
    spreads: tuple[Spread, ...] = field(default=(), metadata=OMIT)

    def problems(self) -> Iterator[tuple[Where, str]]:
        if not self.shard and not self.replicate:
            yield (), "a unit works over no axis"
        if not self.group and len(self.members) > 1:
            yield ("members",), "only a group has several members"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divide(Op):
    """`set_gradient_divide_factor` of every unit, or of some.

    Args:
        factor: what summed gradients are divided by.
        units: those that more ranks add up, after all others; empty for every unit.
    """

    factor: Positive
    units: tuple[Modules, ...] = field(default=(), metadata=OMIT)


Depth = Annotated[int, Form({"minimum": 0, "maximum": 1_000_000})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Op):
    """`set_modules_to_forward_prefetch` and `..._backward_prefetch` along a list of units.

    Args:
        units: sets with the list's indices at one place of their paths; of one entry they run in
            this order, outer ones before those inside them.
        forward, backward: how many entries ahead are gathered; 0 leaves it to FSDP.
    """

    units: Some[Modules]
    forward: Depth = 0
    backward: Depth = 0

    @property
    def returning(self) -> tuple[Modules, ...]:
        """The units of an entry in the order of the backward pass: the last first, but a unit
        before those inside it, as its hook is on its output."""
        result: list[Modules] = []
        for modules in self.units:
            around = [i for i, outer in enumerate(result) if modules.within(outer)]
            result.insert(around[-1] + 1 if around else 0, modules)
        return tuple(result)
