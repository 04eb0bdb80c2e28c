"""Styles of the IR -> styles of torch."""

from __future__ import annotations

import importlib
from typing import Any, assert_never

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from planc.ops import styles as ir
from planc.runtime.standalone.tensor_styles import (
    BareParallel,
    DividedAttributes,
    ExpertsParallel,
    FeaturesParallel,
    PackedParallel,
    RotaryGradient,
    SummedGradient,
    TransposedParallel,
)


def layout(value: ir.Layout) -> Placement:
    match value:
        case ir.Replicate():
            return Replicate()
        case ir.Shard():
            return Shard(value.dim)
        case ir.Partial():
            return Partial()
        case _:
            assert_never(value)


def build(style: ir.Style) -> ParallelStyle:
    """torch's style for one of the IR's; it holds no state, so like modules can share it."""
    match style:
        case ir.Colwise() | ir.Rowwise():
            return _weighted(style)
        case ir.Sequence():
            return SequenceParallel(sequence_dim=style.dim, use_local_output=style.local)
        case ir.Input():
            return _input(style)
        case ir.Output():
            return PrepareModuleOutput(
                output_layouts=_sides(style.positional)[0],
                desired_output_layouts=_sides(style.positional)[1],
                use_local_output=style.local,
            )
        case ir.Replicated():
            return SummedGradient()  # one that only says so is not lowered
        case ir.MlaKv():
            return RotaryGradient(style.rope)
        case ir.Features():
            return FeaturesParallel()
        case ir.Attributes():
            return DividedAttributes(*style.names)
        case ir.Custom():
            given = {name: _list(value) for name, value in style.arguments}
            made: ParallelStyle = imported(style.path)(**given)
            return made
        case ir.Parameters():
            held, packed = _held(style)
            return BareParallel(held, parts=packed)
        case ir.Experts():
            held, packed = _held(style)
            left = style.output in (ir.Partial(), ir.Shard(-1))
            return ExpertsParallel(
                held,
                parts=packed,
                input_layout=layout(style.input),
                output_layout=None if left else layout(style.output),
                use_local_output=style.local,
            )
        case _:
            assert_never(style)


def _list(value: ir.Literal) -> Any:
    return [_list(v) for v in value] if isinstance(value, tuple) else value


def imported(path: str) -> Any:
    """The class of `package.module:Class`, which runs the code of its module.

    Raises:
        TypeError: it is no `ParallelStyle`.
        Exception: whatever importing raises.
    """
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, ParallelStyle)):
        raise TypeError(f"{name} is no torch.distributed.tensor.parallel.ParallelStyle")
    return found


def _weighted(style: ir.Colwise | ir.Rowwise) -> ParallelStyle:
    kind = ColwiseParallel if isinstance(style, ir.Colwise) else RowwiseParallel
    made = kind(
        input_layouts=layout(style.input),
        output_layouts=layout(style.output),
        use_local_output=style.local,
    )
    parts = 1 if style.interleaved else style.parts  # what alternates stays in its order
    if style.transposed:
        return TransposedParallel(made, parts=parts)
    return made if parts == 1 else PackedParallel(made, parts=parts)


def _held(style: ir.Bare) -> tuple[dict[str, Placement], dict[str, ir.Parts]]:
    """The placement of each bare parameter, and what lies side by side in some."""
    packed = {
        name: held.parts for name, held in style.held if held.parts != 1 and not held.interleaved
    }
    return {name: layout(held.layout) for name, held in style.held}, packed


def _input(style: ir.Input) -> PrepareModuleInput:
    arrives, wanted = _sides(style.positional)
    return PrepareModuleInput(
        input_layouts=arrives or None,
        desired_input_layouts=wanted or None,
        input_kwarg_layouts={name: layout(c.source) for name, c in style.named} or None,
        desired_input_kwarg_layouts={name: layout(c.target) for name, c in style.named} or None,
        use_local_output=style.local,
    )


def _sides(
    changes: tuple[ir.Change | None, ...],
) -> tuple[tuple[Placement | None, ...], tuple[Placement | None, ...]]:
    arrives = tuple(layout(c.source) if c else None for c in changes)
    wanted = tuple(layout(c.target) if c else None for c in changes)
    return arrives, wanted
