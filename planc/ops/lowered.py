"""The lowered plan: ordered operations as plain data.

This is the artifact: what `apply` runs, what `lower` prints, what `diff` compares and what the
emitted Python spells out. It names modules by path and holds no torch object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from planc.ops.base import Axes, Count, Form, Name, Size, key
from planc.ops.fsdp import FullyShard
from planc.ops.megatron_fsdp import MegatronShard
from planc.ops.registry import AnyOp
from planc.ops.styles import Custom
from planc.ops.tensor_parallel import Parallelize

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    name: Name
    size: Size
    inferred: bool = False
    place: str = field(default="", compare=False)


_MESH = Form({"minItems": 1, "maxItems": 16})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A plan for one model on one mesh, ready to run.

    Args:
        plan: the plan's name.
        model: the model's class.
        family: its `model_type`.
        layers: the length of its longest list of blocks.
        axes: the mesh, outermost first.
        data: the axes over which the data differs; sampler rank and size follow from them.
        ops: in the order in which `apply` runs them.
        parameters: bytes of parameters that one rank holds at rest.
        gathered: bytes of the largest unit while it is gathered.
    """

    plan: Name
    model: Name
    family: Name
    layers: Count
    axes: Annotated[tuple[MeshAxis, ...], _MESH] = field(metadata=key("mesh"))
    data: Axes
    parameters: Count = 0
    gathered: Count = 0
    ops: tuple[AnyOp, ...]

    @property
    def code(self) -> tuple[str, ...]:
        """The `package.module:Class` of each style of the plan's own: code that apply imports."""
        styles = (op.style for op in self.ops if isinstance(op, Parallelize))
        return tuple(dict.fromkeys(s.path for s in styles if isinstance(s, Custom)))

    @property
    def world_size(self) -> int:
        size = 1
        for axis in self.axes:
            size *= axis.size
        return size

    @property
    def averaged(self) -> tuple[str, ...]:
        """The axes over which gradients are averaged: those of the data, and of the sequence."""
        units = [op for op in self.ops if isinstance(op, FullyShard | MegatronShard)]
        names = {name for op in units for name in (*op.shard, *op.replicate)}
        # a unit may lie on tensor ranks too, which have the same gradients
        names &= {*self.data, "cp"}
        return tuple(a.name for a in self.axes if a.name in names)

    def axis_size(self, *names: str) -> int:
        size = 1
        for axis in self.axes:
            if axis.name in names:
                size *= axis.size
        return size
