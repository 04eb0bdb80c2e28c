"""What arrives at a module beside what the plan says that arrives.

A style tells torch the layout of a local tensor, and torch believes it. Here the tensors of all
ranks are at hand, and so is the whole tensor of the plain run, so the layout can be told from
the numbers. A distributed tensor knows its layout by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from planc.ops import styles as ir
from planc.ops.lowered import Lowered
from planc.ops.tensor_parallel import Parallelize
from planc.trial.numerics import relative
from planc.trial.trace import ModuleCall


def by_rank(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of each simulated rank; a plain tensor is the same on all."""
    if isinstance(value, DTensor):
        value = value.to_local()
    parts = getattr(value, "_local_tensors", None)
    return list(parts.values()) if parts is not None else [value]


def stated_inputs(lowered: Lowered) -> Iterator[tuple[str, str, ir.Layout, str]]:
    """What the styles of a plan say of their inputs: module, input, layout and axis."""
    for op in lowered.ops:
        if isinstance(op, Parallelize):
            for which, layout in _inputs(op.style):
                for name in op.modules.names():
                    yield name, which, layout, op.axes[0]


def _inputs(style: ir.Style) -> Iterator[tuple[str, ir.Layout]]:
    match style:
        case ir.Colwise() | ir.Rowwise():
            yield "0", style.input
        case ir.Sequence():
            yield "0", ir.Shard(style.dim)
        case ir.Input():
            yield from ((str(i), c.source) for i, c in enumerate(style.positional) if c)
            yield from ((name, c.source) for name, c in style.named)


def observed_layouts(
    value: torch.Tensor, wanted: torch.Tensor, limit: float
) -> tuple[ir.Layout, ...]:
    """Every layout in which the ranks' tensors are the wanted one; none where they are not.

    Args:
        value: as the ranks have it.
        wanted: the whole tensor.
        limit: the largest relative error.
    """
    if isinstance(value, DTensor):
        return tuple(filter(None, [_named(value.placements[0])]))
    parts = by_rank(value)
    found: list[ir.Layout] = []
    if all(_same(part, wanted, limit) for part in parts):
        found.append(ir.Replicate())
    if len(parts) == 1:
        return tuple(found)
    for dim in range(wanted.dim()):
        others = [(*p.shape[:dim], *p.shape[dim + 1 :]) for p in parts]
        fit = set(others) == {(*wanted.shape[:dim], *wanted.shape[dim + 1 :])}
        if fit and _same(torch.cat(parts, dim), wanted, limit):
            found.append(ir.Shard(dim))
    alike = {p.shape for p in parts} == {wanted.shape}
    if not found and alike and _same(torch.stack(parts).sum(0), wanted, limit):
        found.append(ir.Partial())
    return tuple(found)


def _named(placement: object) -> ir.Layout | None:
    match placement:
        case Replicate():
            return ir.Replicate()
        case Shard():
            return ir.Shard(placement.dim)
        case Partial():
            return ir.Partial()
    return None


def _same(value: torch.Tensor, wanted: torch.Tensor, limit: float) -> bool:
    if value.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return bool(torch.equal(value, wanted))
    return relative(value, wanted, 1e-12) < limit


def agrees(layout: ir.Layout, found: tuple[ir.Layout, ...], ndim: int) -> bool:
    """Whether what a style says is among what was found."""
    if isinstance(layout, ir.Shard) and layout.dim < 0:
        layout = ir.Shard(layout.dim + ndim)
    return layout in found


def resized_inputs(
    mine: ModuleCall, right: ModuleCall
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The integer inputs (positions, ids) whose size is not that of the plain run.

    The model's own code makes them from sizes that it reads, and of a local part of a sequence it
    reads the wrong one.
    """
    for which, value in mine.inputs.items():
        wanted = right.inputs.get(which)
        if wanted is None or wanted.is_floating_point() or isinstance(value, DTensor):
            continue
        part = by_rank(value)[0]
        if part.shape != wanted.shape:
            yield which, part, wanted
