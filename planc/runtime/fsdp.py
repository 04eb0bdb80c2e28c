"""What FSDP and checkpoints are asked to do, and what is set on units afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.fsdp import Divide, FullyShard, Prefetch
from planc.ops.load import Load
from planc.plan.unit_lists import entries, of_entry
from planc.runtime.meshes import Meshes
from planc.runtime.sharded_tensors import units
from planc.runtime.standalone import activation_checkpoint, load_weights


def arrive(model: nn.Module, op: Load) -> None:
    """The types that parameters are kept in, before anything is made of them."""
    if op.dtype is not None:
        load_weights.keep_in(model, _dtype(op.dtype), op.pattern)


def keywords(op: FullyShard, meshes: Meshes, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The arguments that all calls of an operation share."""
    mesh = meshes.data(op.shard, op.replicate)
    shared: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_dtype(op.param),
            reduce_dtype=_dtype(op.reduce),
            output_dtype=_dtype(op.output),
            cast_forward_inputs=op.cast_inputs,
        ),
    }
    if op.shard:
        shared["reshard_after_forward"] = op.reshard
    if op.ignored:
        names = (name for some in op.ignored for name in some.names())
        shared["ignored_params"] = {p for name in names for p in modules[name].parameters()}
    if op.spreads:
        shared["shard_placement_fn"] = _spread(op, meshes, modules)
    elif op.shard_dim:
        shared["shard_placement_fn"] = _along(op.shard_dim, mesh.size(mesh.ndim - 1))
    if op.offload:
        pin = op.pin and torch.cuda.is_available()  # without a device nothing can pin memory
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)
    return shared


def wrap(op: FullyShard, module: nn.Module | list[nn.Module], shared: dict[str, Any]) -> None:
    """One call of `fully_shard`, or of `replicate` where there is nothing to shard over."""
    if op.shard:
        fully_shard(module, **shared)
        return
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, **shared)


def _along(dim: int, ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Splits that dim of the parameters that have it, where it divides; torch asks for no less.

    What tensor parallelism left of a parameter is what FSDP splits.
    """

    def placement(parameter: nn.Parameter) -> Shard | None:
        shape = getattr(parameter, "_local_tensor", parameter).shape
        return Shard(dim) if 0 < dim < len(shape) and shape[dim] % ranks == 0 else None

    return placement


def _spread(
    op: FullyShard, meshes: Meshes, modules: Mapping[str, nn.Module]
) -> Callable[[nn.Parameter], Any]:
    """Parameters on a mesh of their own, beside the rest of their unit.

    torch has what it takes since 2.12 (`ShardPlacementResult`), by names that it keeps to itself.
    Parameters of one process group must come with one and the same object for it.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    infos: dict[Any, FSDPMeshInfo | None] = {(op.shard, op.replicate): None}  # the unit's own
    lying: dict[nn.Parameter, tuple[Any, Any]] = {}
    for spread in op.spreads:
        axes = (spread.shard, spread.replicate)
        mesh = meshes.data(*axes)
        if axes not in infos and spread.replicate:
            infos[axes] = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        elif axes not in infos:
            infos[axes] = FSDPMeshInfo(mesh, shard_mesh_dim=0)
        along = _along(spread.shard_dim, mesh.size(mesh.ndim - 1))
        for name in spread.modules.names():
            lying |= dict.fromkeys(modules[name].parameters(), (along, infos[axes]))
    own = meshes.data(op.shard, op.replicate)
    rest = (_along(op.shard_dim, own.size(own.ndim - 1)), None)

    def placement(parameter: nn.Parameter) -> Any:
        along, info = lying.get(parameter, rest)
        return along(parameter) if info is None else ShardPlacementResult(along(parameter), info)

    return placement


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def divide(
    op: Divide, model: nn.Module, modules: Mapping[str, nn.Module], mesh: DeviceMesh
) -> None:
    """Gradients are summed and divided by a number, in every unit or in some."""
    names = [name for members in op.units for name in members.names()]
    some: list[Any] = [modules[name] for name in names]
    for unit in some or units(model):
        unit.set_gradient_divide_factor(op.factor)
        # torch's own way is a reduction that scales first, which gloo does not have
        unit.set_force_sum_reduction_for_comms(mesh.device_type == "cpu")


def prefetch(op: Prefetch, modules: Mapping[str, nn.Module]) -> None:
    """Each entry of a list gathers the units of the next ones with its own."""
    indices = list(entries(op.units))
    for depth, forward in ((op.forward, True), (op.backward, False)):
        order = op.units if forward else op.returning
        parts = [[of_entry(some, index) for some in order] for index in indices]
        blocks = [[modules[n] for part in some if part for n in part.names()] for some in parts]
        if not forward:
            blocks.reverse()
        for i, (first, *_) in enumerate(blocks):
            ahead: Any = [unit for block in blocks[i + 1 : i + 1 + depth] for unit in block]
            if ahead and forward:
                first.set_modules_to_forward_prefetch(ahead)
            elif ahead:
                first.set_modules_to_backward_prefetch(ahead)


def recomputing(op: Checkpoint) -> dict[str, Any]:
    """What `checkpoint_wrapper` is given beside the module; nothing that is torch's default."""
    for save in op.save:
        if save.name in save.ops and not list(activation_checkpoint.operators(save.ops)):
            raise ValueError(f"torch has no operator {save.name}")
    groups = [(save.every, save.ops) for save in op.save]
    options: dict[str, Any] = {}
    if groups:
        options["context_fn"] = (
            activation_checkpoint.saving_on_cpu(op.pin, *groups)
            if op.offload
            else activation_checkpoint.saving(*groups)
        )
    if not op.preserve_rng:
        options["preserve_rng_state"] = False
    if not op.early_stop:
        options["early_stop"] = False
    return (
        {"checkpoint_fn": activation_checkpoint.offloading(op.pin, **options)}
        if op.offload
        else options
    )
