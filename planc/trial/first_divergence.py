"""Finds where two models diverge: the first module, in execution order, whose output differs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from planc.ops import styles as ir
from planc.ops.contract import output_layout
from planc.ops.lowered import Lowered
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.run import Run
from planc.trial.numerics import full_copy, relative
from planc.trial.trace import main_tensor, named_modules

Outputs = dict[str, torch.Tensor]
Take = Callable[[str, torch.Tensor], torch.Tensor | None]


def outputs_of(model: nn.Module, take: Take, **inputs: Any) -> Outputs:
    """The first output of each module, by name, as modules end; `take` picks a tensor, or None."""
    found: Outputs = {}

    def keep(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        value = main_tensor(output)
        if value is not None and name not in found:
            kept = take(name, value)
            if kept is not None:
                found[name] = kept

    with ExitStack() as hooks:
        for name, module in named_modules(model).items():
            hooks.callback(module.register_forward_hook(partial(keep, name)).remove)
        model(**inputs)
    return found


def first_difference(right: Outputs, mine: Outputs, limit: float) -> tuple[str, float] | None:
    """The first module whose output differs by more than the limit, and the error.

    An output with another shape than the right one, a shard in a layout that no rule states, is
    left out because it cannot be compared.
    """
    for name, value in mine.items():
        expected = right.get(name)
        if expected is None or expected.shape != value.shape:
            continue
        error = relative(value, expected)
        if error > limit:
            return name or "the model", error
    return None


def whole_outputs(run: Run, lowered: Lowered) -> Take:
    """A function that gathers outputs of a parallel model.

    A DTensor has its layout; for a module with a style, the plan states the layout of its local
    output. Gathering is a collective that all ranks join, because they run the same code.
    """
    stated = dict(_stated(lowered))

    def take(name: str, value: torch.Tensor) -> torch.Tensor | None:
        if isinstance(value, DTensor):
            return full_copy(value)
        if name not in stated:
            return value.detach().clone()
        axis, layout = stated[name]
        mesh = run.submesh(axis)
        match layout:
            case ir.Shard():
                placed = DTensor.from_local(value.detach(), mesh, [Shard(layout.dim)])
                return placed.full_tensor()
            case ir.Partial():
                return None
        return value.detach().clone()

    return take


def _stated(lowered: Lowered) -> Iterator[tuple[str, tuple[str, ir.Layout]]]:
    """Yields the layouts of local outputs that the styles of a plan state."""
    for op in lowered.ops:
        if isinstance(op, Parallelize) and lowered.axis_size(*op.axes) > 1:
            (axis,) = op.axes  # styles with layouts take one axis
            style = op.style
            if isinstance(style, ir.Colwise) and style.parts != 1 and not style.interleaved:
                continue  # each rank has a slice of each part; no layout describes it
            if (layout := output_layout(style)) is not None:
                for name in op.modules.names():
                    yield name, (axis, layout)
