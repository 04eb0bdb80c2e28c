"""Clips gradients by the norm of the full model, over every mesh and all stages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.shards import gradient_part, part_of, splits, whole_of

Dims = tuple[tuple[DeviceMesh, int], ...]
"""Dims of meshes."""


def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients so that the norm of the full model's is at most `max_norm`.

    Parameters may be on different meshes, or on none. Gradients of one layout are
    summed on each rank, then over the mesh dims that shard them, but not over those
    that replicate them; then over the stages of a pipeline.

    Args:
        model: a model after its backward pass; every rank calls this.
        max_norm: the largest norm allowed; with infinity gradients are not scaled.
        norm_type: 2 for the Euclidean norm, infinity for the largest absolute value.
        error_if_nonfinite: whether to raise if the norm is not finite.

    Returns:
        The norm before scaling, a scalar of float32, of a model with parameters in
        float64 of that; the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        ValueError: `norm_type` is not positive.
    """
    if norm_type <= 0:
        raise ValueError(f"norm_type is {norm_type}; it is a positive number or inf")
    with torch.no_grad():
        norm = norm_of_gradients(model, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}")
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in (p.grad for p in model.parameters()):
            if gradient is not None:
                part = part_of(gradient)
                part.mul_(scale.to(part.device, part.dtype))
    return norm


def norm_of_gradients(model: nn.Module, norm_type: float) -> Tensor:
    """The norm over all ranks, each gradient counted once."""
    stages = stages_of(model)
    parts_of: dict[Dims, list[Tensor]] = {}
    device: Any = "cpu"
    # the first rank that holds a parameter counts it
    copies = stages.counted_elsewhere(model) if stages is not None else []
    for parameter in model.parameters():  # those without gradients too: ranks agree
        dims, part = share_of_gradient(parameter)
        device = device_of_norm(parameter)
        parts = parts_of.setdefault(dims, [])
        counted = not any(parameter is copy for copy in copies)
        if part is not None and part.numel() and counted:
            parts.append(part)
    # also of a rank that holds nothing: ranks exchange numbers of one dtype
    double = any(p.dtype == torch.float64 for p in model.parameters())
    wide = torch.float64 if double else torch.float32
    total = torch.zeros((), device=device, dtype=wide)
    for dims, parts in parts_of.items():
        power = power_over(parts, dims, norm_type, total)
        total = added_power(total, power, norm_type)
    if stages is not None:
        group = stages.mesh.get_group()
        distributed.all_reduce(total, op=kind_of_norm(norm_type), group=group)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def share_of_gradient(parameter: Tensor) -> tuple[Dims, Tensor | None]:
    """The mesh dims that shard a parameter, and this rank's shard of its gradient."""
    gradient = parameter.grad
    if not isinstance(parameter, DTensor):
        return (), None if gradient is None else whole_of(gradient)
    mesh, placements = parameter.device_mesh, parameter.placements
    wide = (i for i, p in enumerate(placements) if splits(p) and mesh.size(i) > 1)
    dims = tuple((mesh, i) for i in wide)
    return dims, None if gradient is None else gradient_part(parameter)


def device_of_norm(parameter: Tensor) -> Any:
    """The device for reducing a norm: an offloaded parameter's mesh has no backend for
    the CPU.
    """
    if isinstance(parameter, DTensor):
        kind = parameter.device_mesh.device_type
        here = parameter.device.type == kind
        return parameter.device if here else torch.device(kind)
    return parameter.device


def power_over(
    parts: list[Tensor], dims: Dims, norm_type: float, like: Tensor
) -> Tensor:
    """The sum of powers (or the maximum) over the shards of all ranks, in the dtype and
    on the device of a scalar.
    """
    total = torch.zeros_like(like)
    norms = torch._foreach_norm(parts, norm_type, dtype=like.dtype) if parts else ()
    for norm in norms:
        power = norm if math.isinf(norm_type) else norm**norm_type
        total = added_power(total, power.to(like.device), norm_type)
    for mesh, dim in dims:
        group = mesh.get_group(dim)
        distributed.all_reduce(total, op=kind_of_norm(norm_type), group=group)
    return total


def kind_of_norm(norm_type: float) -> Any:
    """The reduce operation for the powers of a norm over ranks."""
    inf = math.isinf(norm_type)
    return distributed.ReduceOp.MAX if inf else distributed.ReduceOp.SUM


def added_power(first: Tensor, other: Tensor, norm_type: float) -> Tensor:
    """Two sums of powers, or maxima, as one."""
    return torch.maximum(first, other) if math.isinf(norm_type) else first + other
