"""Styles of the IR -> styles of torch."""

from __future__ import annotations

from typing import assert_never

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

from planc.ir import style as ir


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
            kind = ColwiseParallel if isinstance(style, ir.Colwise) else RowwiseParallel
            return kind(
                input_layouts=layout(style.input),
                output_layouts=layout(style.output),
                use_local_output=style.local,
            )
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
        case _:
            assert_never(style)


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
