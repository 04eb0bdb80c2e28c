"""`parallelize_module`, and the ties that it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planc.model.facts import Modules
from planc.ops.base import Axis, Dims, Name, Op, Some, Where
from planc.ops.call import (
    MESH,
    PARALLELIZE,
    Assign,
    Call,
    Context,
    Each,
    Index,
    Parameter,
    ScriptFunction,
    Shared,
    Step,
)
from planc.ops.style_calls import style_call
from planc.ops.styles import Style, mesh_dims, style_name

_SCRIPT = ScriptFunction("tensor_parallel", "Splits weights and activations over the tensor axes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A parameter's shape before and after an operation, on the rank that holds most."""

    name: Name
    shape: Dims
    local: Dims

    def problems(self) -> Iterator[tuple[Where, str]]:
        if len(self.shape) != len(self.local):
            yield (), "shape and local have different numbers of dims"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelize(Op):
    """`parallelize_module(module, mesh[axes], style)` for each module.

    Args:
        axes: the part of the mesh that the style takes, outermost first.
        shapes: of the parameters that it splits; several operations on a module split in turn.
    """

    modules: Modules
    axes: Some[Axis]
    style: Style
    shapes: tuple[Shape, ...] = ()

    SCRIPT: ClassVar = _SCRIPT

    def problems(self) -> Iterator[tuple[Where, str]]:
        dims = mesh_dims(self.style)
        if len(self.axes) != dims:
            yield ("axes",), f"{style_name(self.style)} takes {dims} axis, not {len(self.axes)}"

    def calls(self, _context: Context) -> Iterator[Step]:
        mesh = Shared(f"{'_'.join(self.axes)}_mesh", Index(MESH, self.axes))
        call = Call(PARALLELIZE, (mesh, style_call(self.style)))
        yield Each(modules=self.modules, calls=(call,), note=self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie(Op):
    """`parallelize_module` makes new parameters, so a tie is made again: parameter = source.

    Both are torch names of parameters, such as `lm_head.weight`.
    """

    parameter: Name
    source: Name

    SCRIPT: ClassVar = _SCRIPT

    def calls(self, _context: Context) -> Iterator[Step]:
        note = "a split weight is a new parameter: what was one is tied again"
        target, source = Parameter(self.parameter), Parameter(self.source)
        yield Assign(target=target, value=source, note=note)
