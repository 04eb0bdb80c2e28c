"""Methods of `Run` for a training loop: accumulation, inference, clipping, full weights."""

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from planc.runtime.preconditions import stop
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone import shards
from planc.runtime.standalone.loss import IGNORED
from planc.runtime.standalone.pipeline import Stages, stages_of
from planc.runtime.standalone.shards import fsdp_units, groups_of, part_of, splits, whole_of


def require_current(
    model: nn.Module, optimizer: Optimizer, before: Iterable[weakref.ref[nn.Parameter]]
) -> None:
    """Refuses an optimizer of parameters that the plan has replaced: no gradient reaches them, so
    its steps would change nothing.

    Args:
        model: after the plan was applied.
        optimizer: of its parameters.
        before: the parameters that the model had before.

    Raises:
        PlanError: PL486.
    """
    kept = {id(parameter) for parameter in model.parameters()}
    replaced = {id(known) for each in before if (known := each()) is not None} - kept
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if count := sum(id(parameter) in replaced for parameter in stepped):
        raise stop(
            "PL486",
            f"{count} of the {len(stepped)} parameters of the optimizer are no longer in the model:"
            " the plan has replaced them",
            help="create the optimizer after `planc.apply`",
        )


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside accumulate gradients without communication over the data axes.

    The first backward pass after it reduce-scatters the sum. Until then gradients are unsharded, so
    this saves communication and costs memory.
    """
    every = fsdp_units(model)
    for unit in every:
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in every:
            unit.set_requires_gradient_sync(True, recurse=False)


def num_items_in_batch(labels: Sequence[Tensor], mesh: DeviceMesh | None) -> Tensor:
    """The valid labels of all data ranks, over the number of data ranks: [] in float32."""
    return mean_over(torch.stack([valid_labels(some) for some in labels]).sum().float(), mesh)


def valid_labels(labels: Tensor) -> Tensor:
    """The labels that count: [rows, length], without the first of a row, or one for each row."""
    return ((labels[..., 1:] if labels.dim() > 1 else labels) != IGNORED).sum()


def mean_over(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The mean of a number of each rank of a mesh, in place where there are several."""
    if mesh is None:
        return value
    value = value.to(mesh.device_type)
    distributed.all_reduce(value, group=mesh.get_group())
    return value / mesh.size()


@contextmanager
def unshard(model: nn.Module) -> Iterator[None]:
    """All-gathers the parameters of every unit once, for any number of forward passes inside.

    Every rank must enter and leave it. Backward passes inside are not supported.
    """
    sharded = [unit for unit in fsdp_units(model) if all(map(_sharded, groups_of(unit)))]
    before = [(g, g.post_forward_mesh_info) for unit in sharded for g in groups_of(unit)]
    automatic = [(state, state._auto_reshard_after_forward) for state in map(_state, sharded)]
    try:
        for unit in sharded:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for group, mesh in before:
            group.post_forward_mesh_info = mesh
        for state, value in automatic:
            state._auto_reshard_after_forward = value
        reshard(model)


def _sharded(group: Any) -> bool:
    """Whether a parameter group is sharded; a replicated one needs no all-gather."""
    return hasattr(group.mesh_info, "shard_mesh_size")


def _state(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


# Clipping ----------------------------------------------------------------------------------------

_Axes = tuple[tuple[DeviceMesh, int], ...]


def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    stages: Stages | None = None,
) -> Tensor:
    """Scales all gradients so that the norm of the full model's gradient is at most `max_norm`.

    Parameters may be on different meshes, or on none. Gradients of one layout are summed on each
    rank, then over the mesh dims that shard them, but not over those that replicate them.

    Args:
        model: a model after its backward pass; every rank calls this.
        max_norm: the largest norm allowed; with infinity gradients are not scaled.
        norm_type: 2 for the Euclidean norm, infinity for the largest absolute value.
        error_if_nonfinite: whether to raise if the norm is not finite.
        stages: of a pipeline, whose ranks hold different parameters.

    Returns:
        The norm before scaling, a scalar of float32, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    with torch.no_grad():
        norm = _norm(model, norm_type, stages)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}")
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in (p.grad for p in model.parameters()):
            if gradient is not None:
                part = part_of(gradient)
                part.mul_(scale.to(part.device, part.dtype))
    return norm


def _norm(model: nn.Module, norm_type: float, stages: Stages | None) -> Tensor:
    parts_of: dict[_Axes, list[Tensor]] = {}
    device: Any = "cpu"
    # the first stage counts what the last one has a copy of
    copies = [*stages.copies(model).values()] if stages and stages.last else []
    for parameter in model.parameters():  # also those without gradients: ranks must agree
        axes, part = _share(parameter)
        device = _device(parameter)
        parts = parts_of.setdefault(axes, [])
        if part is not None and part.numel() and not any(parameter is copy for copy in copies):
            parts.append(part)
    total = torch.zeros((), device=device)
    for axes, parts in parts_of.items():
        total = _add(total, _reduced(parts, axes, norm_type, device), norm_type)
    if stages is not None:
        distributed.all_reduce(total, op=_kind(norm_type), group=stages.mesh.get_group())
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def _share(parameter: Tensor) -> tuple[_Axes, Tensor | None]:
    """The mesh dims that shard a parameter, and this rank's shard of its gradient."""
    gradient = parameter.grad
    if not isinstance(parameter, DTensor):
        return (), None if gradient is None else whole_of(gradient)
    mesh, placements = parameter.device_mesh, parameter.placements
    axes = tuple((mesh, i) for i, p in enumerate(placements) if splits(p) and mesh.size(i) > 1)
    if isinstance(gradient, DTensor) and gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)  # a norm's gradient is partial
    return axes, None if gradient is None else part_of(gradient)


def _device(parameter: Tensor) -> Any:
    """The device for reducing a norm: an offloaded parameter's mesh has no backend for the CPU."""
    if isinstance(parameter, DTensor):
        kind = parameter.device_mesh.device_type
        return parameter.device if parameter.device.type == kind else torch.device(kind)
    return parameter.device


def _reduced(parts: list[Tensor], axes: _Axes, norm_type: float, device: Any) -> Tensor:
    """The sum of powers (or the maximum) over the shards of all ranks."""
    total = torch.zeros((), device=device)
    norms = torch._foreach_norm(parts, norm_type, dtype=torch.float32) if parts else ()
    for norm in norms:
        power = norm if math.isinf(norm_type) else norm**norm_type
        total = _add(total, power.to(device), norm_type)
    for mesh, axis in axes:
        distributed.all_reduce(total, op=_kind(norm_type), group=mesh.get_group(axis))
    return total


def _kind(norm_type: float) -> Any:
    return distributed.ReduceOp.MAX if math.isinf(norm_type) else distributed.ReduceOp.SUM


def _add(one: Tensor, other: Tensor, norm_type: float) -> Tensor:
    return torch.maximum(one, other) if math.isinf(norm_type) else one + other


# Full weights ------------------------------------------------------------------------------------


def full_state_dict(model: nn.Module, *, every_rank: bool = False) -> dict[str, Tensor]:
    """The full state dict on the CPU, all-gathered one tensor at a time; every rank must call it.

    Args:
        model: sharded or not.
        every_rank: whether all ranks get it; otherwise rank 0 gets it and others an empty dict.

    Returns:
        Tensors by their names before anything was wrapped; a tied tensor has each of its names.
        4-bit weights are left out, because their bytes have no meaning without their scales.
    """
    reshard(model)
    stages = stages_of(model)
    if stages is None:
        return shards.full_state_dict(model, every_rank=every_rank)
    group = stages.mesh.get_group()
    wanted = every_rank or 0 in distributed.get_process_group_ranks(group)
    own = shards.full_state_dict(model, every_rank=wanted)
    if not wanted:
        return {}
    found = _of_all_stages(own, stages)
    keep = every_rank or distributed.get_rank() == 0
    return {name: found[name] for name in stages.names if name in found} if keep else {}


def _of_all_stages(own: dict[str, Tensor], stages: Stages) -> dict[str, Tensor]:
    """The tensors of all stages on the CPU, each sent by the first stage that has it."""
    group, device = stages.mesh.get_group(), stages.mesh.device_type
    forms: list[Any] = [None] * stages.mesh.size()
    mine = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    distributed.all_gather_object(forms, mine, group=group)
    found: dict[str, Tensor] = {}
    for rank, told in enumerate(forms):
        for name, (shape, dtype) in told.items():
            if name not in found:
                here = rank == stages.mesh.get_local_rank()
                sent = own[name] if here else torch.empty(shape, dtype=dtype)
                sent = sent.to(device)
                distributed.broadcast(sent, group=group, group_src=rank)
                found[name] = sent.cpu()
    return found
