"""Shard placements of FSDP, and settings of its units."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from planc.runtime.standalone.shards import groups_of

Split = Callable[[nn.Parameter], Shard | None]
Spread = tuple[Iterable[nn.Module], Split | None, Any]
Units = Iterable[tuple[int, FSDPModule]]


def parameters_of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The parameters of some modules and their submodules."""
    return {parameter for module in modules for parameter in module.parameters()}


def one_element(modules: Iterable[nn.Module]) -> None:
    """Gives parameters without dims one, because FSDP shards a dim.

    Values that are read as scalars broadcast as before; `shards.scalars_of` names them.
    """
    parameters: dict[int, nn.Parameter] = {}
    for inner in {part for module in modules for part in module.modules()}:
        for name, parameter in inner._parameters.items():
            if parameter is None or parameter.dim():
                continue
            with_dim = nn.Parameter(
                parameter.detach().reshape(1), parameter.requires_grad
            )
            inner._parameters[name] = parameters.setdefault(id(parameter), with_dim)
            known: set[str] = getattr(inner, "scalar_parameters", set())
            inner.scalar_parameters = known | {name}


def along(dim: int, ranks: int) -> Split:
    """A `shard_placement_fn` that shards `dim` of parameters where it is divisible.

    Other parameters are sharded on dim 0. Shapes are local under tensor parallelism.
    """

    def placement(parameter: nn.Parameter) -> Shard | None:
        shape = getattr(parameter, "_local_tensor", parameter).shape
        fits = len(shape) > dim and shape[dim] % ranks == 0
        return Shard(dim) if fits else None

    return placement


def placements(*spreads: Spread) -> dict[nn.Parameter, tuple[Split | None, Any]]:
    """The sharding and mesh of parameters; a spread is (modules, split, mesh)."""
    placed: dict[nn.Parameter, tuple[Split | None, Any]] = {}
    for modules, split, info in spreads:
        placed |= dict.fromkeys(parameters_of(modules), (split, info))
    return placed


def spread(
    placed: dict[nn.Parameter, tuple[Split | None, Any]], rest: Split | None = None
) -> Callable[[nn.Parameter], Any]:
    """A `shard_placement_fn` for units with parameters on several meshes.

    Args:
        placed: the result of `placements`.
        rest: the sharding of the unit's other parameters.
    """

    def placement(parameter: nn.Parameter) -> Any:
        split, info = placed.get(parameter, (rest, None))
        shard = split(parameter) if split else None
        if info is None:
            return shard
        from planc.compat.fsdp import _fsdp_common

        return _fsdp_common.ShardPlacementResult(shard, info)

    return placement


def divide_gradients(model: nn.Module, factor: float, device_type: str) -> None:
    """Sets the number by which every unit divides its summed gradients."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(factor)
            # torch would scale within the reduction, which gloo does not support
            unit.set_force_sum_reduction_for_comms(device_type == "cpu")
            for group in groups_of(unit):
                if getattr(group.mesh_info, "shard_mesh_size", 1) == 1:
                    group.force_sum_reduction_for_comms = False
                    group._all_reduce_hook = partial(divide_once, group)


def divide_once(group: Any, gradients: Tensor) -> None:
    """Undoes the second of torch 2.13's divisions where one rank has the whole shard.

    torch divides there once if it leaves the division to the reduction, as for fp32 and
    bf16, and twice otherwise.

    Args:
        group: the parameters of a unit that are reduced together.
        gradients: their sum over the ranks, flattened.
    """
    if gradients.dtype not in (torch.float32, torch.bfloat16):
        gradients.mul_(group.gradient_divide_factor)
        if gradients.is_cuda:  # torch allocated them on another stream
            gradients.record_stream(torch.cuda.current_stream())


def keep_class_names(model: nn.Module) -> None:
    """Gives the subclasses that FSDP creates the names of the model's classes.

    Libraries look for the name of a class in a list: the `Trainer` of transformers
    shifts the labels of a smoothed loss only if the name is that of a causal model.
    """
    for kind in {type(module) for module in model.modules()}:
        if issubclass(kind, FSDPModule):
            original = kind.__mro__[kind._orig_cls_mro_index]
            for name in ("__name__", "__qualname__", "__module__"):
                setattr(kind, name, getattr(original, name))


def prefetch_forward(depth: int, *units: Units) -> None:
    """Each entry of a list all-gathers the units of the next `depth` entries too; units
    are (entry, unit) in the order in which an entry runs them.
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
    for entries in units:
        for entry, unit in entries:
            blocks.setdefault(entry, []).append(unit)
    order = [blocks[entry] for entry in sorted(blocks, reverse=backward)]
    for i, (first, *_) in enumerate(order):
        ahead = [unit for block in order[i + 1 : i + 1 + depth] for unit in block]
        if ahead:
            yield first, ahead
