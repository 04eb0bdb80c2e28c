"""Compares the layouts that arrive at modules with those that the plan states.

A style declares the layout of a local tensor, and torch does not check it. In the simulation, the
tensors of all ranks and the full tensor of the plain run are available, so the layout follows from
the values. A DTensor has its layout.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed.tensor import Partial, Replicate, Shard

from planc.ops import styles as ir
from planc.ops.lowered import Lowered
from planc.simulate.numerics import relative
from planc.simulate.trace import ModuleCall, Seen, Trace, caller


def stated_inputs(lowered: Lowered) -> Iterator[tuple[str, str, ir.Layout, str]]:
    """Yields what the styles of a plan state of inputs: module, input, layout and axis."""
    for op in lowered.styles:
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
    parts: Sequence[Seen], wanted: torch.Tensor, limit: float
) -> tuple[ir.Layout, ...]:
    """Every layout in which the ranks' tensors represent the full tensor; empty for none."""
    if placements := parts[0].placements:
        return tuple(filter(None, [_layout_of(placements[0])]))
    tensors = [part.tensor for part in parts]
    layouts: list[ir.Layout] = []
    if all(_same(tensor, wanted, limit) for tensor in tensors):
        layouts.append(ir.Replicate())
    if len(tensors) == 1:
        return tuple(layouts)
    for dim in range(wanted.dim()):
        others = [(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors if t.dim() > dim]
        fit = set(others) == {(*wanted.shape[:dim], *wanted.shape[dim + 1 :])}
        if fit and _same(torch.cat(tensors, dim), wanted, limit):
            layouts.append(ir.Shard(dim))
    alike = {t.shape for t in tensors} == {wanted.shape}
    if not layouts and alike and _same(torch.stack(tensors).sum(0), wanted, limit):
        layouts.append(ir.Partial())
    return tuple(layouts)


def _layout_of(placement: object) -> ir.Layout | None:
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


def agrees(layout: ir.Layout, layouts: tuple[ir.Layout, ...], ndim: int) -> bool:
    """Whether the stated layout is among the observed ones."""
    if isinstance(layout, ir.Shard) and layout.dim < 0:
        layout = ir.Shard(layout.dim + ndim)
    return layout in layouts


def resized_inputs(
    mine: ModuleCall, right: ModuleCall
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yields integer inputs (positions, ids) whose size differs from that of the plain run.

    The model's code derives them from tensor sizes, and the size of a local shard is wrong.
    """
    for which, value in mine.inputs.items():
        wanted = right.inputs.get(which)
        if wanted is None or wanted.tensor.is_floating_point() or value.placements:
            continue
        # positions may be stated for each row where one process has them once
        rows = int(len(wanted.tensor) == 1) if wanted.tensor.dim() > 1 else 0
        if value.tensor.shape[rows:] != wanted.tensor.shape[rows:]:
            yield which, value.tensor, wanted.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Implicit:
    """An implicit redistribution by a torch op in a module; `before`: the leaf that ended last."""

    module: str
    line: str
    source: str
    target: str
    op: str
    before: str


@contextmanager
def redistributions(
    current: Callable[[], Trace | None], styled: Collection[str], implicit: list[Implicit]
) -> Iterator[None]:
    """Records redistributions of rank 0 that communicate, outside of modules with a style.

    It hooks torch's `ExplicitRedistributionContext`, which by itself only raises or warns,
    without the tensor or the place.

    Args:
        current: gives the trace of the running model, None before it runs.
        styled: the modules with a style, whose redistributions are intended.
        implicit: receives each redistribution once.
    """
    from planc.compat.dtensor import ExplicitRedistributionContext, OpSchema, redistribute_cost

    def observe(source: Any, target: Any, message: Any) -> None:
        trace = current()
        if trace is None or not trace.watching or distributed.get_rank() != 0:
            return
        running = trace.running[-1] if trace.running else ""
        if running in styled or redistribute_cost(source, target) <= 0:
            return
        # torch passes a LazyString whose argument is the op or its schema
        op = next(iter(getattr(message, "args", ())), "an operation")
        seen = Implicit(
            module=running,
            line=caller(),
            source=_text(source),
            target=_text(target),
            before=trace.leaf,
            op=str(op.op if isinstance(op, OpSchema) else op),
        )
        if seen not in implicit:
            implicit.append(seen)

    with patch.object(
        ExplicitRedistributionContext, "observe_redistribution", staticmethod(observe)
    ):
        yield


def _text(spec: Any) -> str:
    return str(_layout_of(spec.placements[0]) or ir.Partial())
