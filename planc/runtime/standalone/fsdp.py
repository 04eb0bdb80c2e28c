"""Which parameters FSDP splits how, and what is set on its units afterwards.

Emitted scripts inline these definitions without their types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

Split = Callable[[nn.Parameter], Shard | None]
Spread = tuple[Iterable[nn.Module], Split | None, Any]
Units = Iterable[tuple[int, FSDPModule]]


def parameters_of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The parameters in and below some modules."""
    return {parameter for module in modules for parameter in module.parameters()}


def along(dim: int, ranks: int) -> Split:
    """A `shard_placement_fn`: a dim is split where a parameter has it and it divides.

    Other parameters are split along dim 0. Shapes are what tensor parallelism left.
    """

    def placement(parameter: nn.Parameter) -> Shard | None:
        shape = getattr(parameter, "_local_tensor", parameter).shape
        fits = len(shape) > dim and shape[dim] % ranks == 0
        return Shard(dim) if fits else None

    return placement


def placements(*spreads: Spread) -> dict[nn.Parameter, tuple[Split | None, Any]]:
    """How and over what parameters are split; a spread is (modules, split, mesh)."""
    lying: dict[nn.Parameter, tuple[Split | None, Any]] = {}
    for modules, split, info in spreads:
        lying |= dict.fromkeys(parameters_of(modules), (split, info))
    return lying


def spread(
    lying: dict[nn.Parameter, tuple[Split | None, Any]], rest: Split | None = None
) -> Callable[[nn.Parameter], Any]:
    """A `shard_placement_fn` for units with parameters on a mesh of their own.

    torch allows that since 2.12.

    Args:
        lying: of `placements`.
        rest: how the unit's other parameters are split.
    """

    def placement(parameter: nn.Parameter) -> Any:
        split, info = lying.get(parameter, (rest, None))
        shard = split(parameter) if split else None
        if info is None:
            return shard
        from torch.distributed.fsdp._fully_shard import _fsdp_common

        return _fsdp_common.ShardPlacementResult(shard, info)

    return placement


def divide_gradients(model: nn.Module, factor: float, device_type: str) -> None:
    """Sets what the summed gradients of every unit are divided by."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(factor)
            # torch would scale within the reduction, which gloo does not have
            unit.set_force_sum_reduction_for_comms(device_type == "cpu")


def prefetch_forward(depth: int, *units: Units) -> None:
    """Each entry of a list gathers the units of the next `depth` entries as well.

    Args:
        depth: how many entries ahead.
        units: (entry, unit) of each unit, in the order in which an entry runs them.
    """
    for first, ahead in _with_next(units, depth, backward=False):
        first.set_modules_to_forward_prefetch(ahead)


def prefetch_backward(depth: int, *units: Units) -> None:
    """`prefetch_forward` for the backward pass, which runs the last entry first."""
    for first, ahead in _with_next(units, depth, backward=True):
        first.set_modules_to_backward_prefetch(ahead)


def _with_next(
    units: Iterable[Units], depth: int, *, backward: bool
) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    """The first unit of each entry, and the units of the next entries."""
    blocks: dict[int, list[FSDPModule]] = {}
    for some in units:
        for entry, unit in some:
            blocks.setdefault(entry, []).append(unit)
    order = [blocks[entry] for entry in sorted(blocks, reverse=backward)]
    for i, (first, *_) in enumerate(order):
        ahead = [unit for block in order[i + 1 : i + 1 + depth] for unit in block]
        if ahead:
            yield first, ahead
