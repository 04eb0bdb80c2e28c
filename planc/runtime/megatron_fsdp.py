"""A model that Megatron-FSDP shards: what must be there, the call, and what a run asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from planc.lowering.megatron_mesh import layout
from planc.ops.lowered import Lowered
from planc.ops.megatron_fsdp import MegatronShard
from planc.runtime.preconditions import stop
from planc.runtime.sharded_tensors import megatron_of
from planc.runtime.standalone.megatron_fsdp import in_place, prepare_optimizer, unit_classes

DEVICES = ("cuda",)
"""Where the package runs: its first lines ask for `torch.cuda.current_device()`."""


def require(lowered: Lowered, device: str) -> None:
    """What a plan with `backend = megatron` needs is there.

    Args:
        lowered: the plan.
        device: the type of device that the run is on.

    Raises:
        PlanError: PL499, there is no megatron_fsdp, or no CUDA.
    """
    if not called(lowered):
        return
    if find_spec("megatron_fsdp") is None:
        raise stop(
            "PL499",
            "the plan has `backend = megatron`, and there is no megatron-fsdp to be imported",
            help="pip install 'planc[megatron]'",
        )
    if device not in DEVICES:
        raise stop(
            "PL499",
            f"Megatron-FSDP runs on CUDA alone, and this run is on {device}",
            help="put the model on a CUDA device, or take `backend = megatron` out",
        )


def called(lowered: Lowered) -> bool:
    """Whether Megatron-FSDP shards the model."""
    return any(isinstance(op, MegatronShard) for op in lowered.ops)


def shard(model: nn.Module, op: MegatronShard, lowered: Lowered, mesh: DeviceMesh) -> None:
    """The one call, and what makes the model itself go on working."""
    import megatron_fsdp

    names, sizes, order = layout(op, lowered)
    ranks = mesh.mesh.permute(*order).reshape(*sizes)
    data = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)
    keywords: dict[str, Any] = dict(op.options)
    if op.replicate:
        hybrid = data[names[0], names[1]]._flatten("hybrid").get_group()
        keywords |= {"dp_outer_dim": names[0], "hybrid_fsdp_group": hybrid}
    if op.experts:
        keywords["expt_device_mesh"] = data
        if op.replicate:
            keywords["hybrid_fsdp_expt_group"] = hybrid
    if op.summed:
        keywords["calculate_per_token_loss"] = True
    wrapped = megatron_fsdp.fully_shard_model(
        module=model,
        device_mesh=data,
        dp_shard_dim=names[-2],
        tp_dim=names[-1],
        fsdp_unit_modules=unit_classes(model, list(op.classes)),
        zero_dp_strategy=op.strategy,
        outer_dp_sharding_strategy=op.outer,
        device=torch.device(mesh.device_type, torch.cuda.current_device()),
        mixed_precision_policy=megatron_fsdp.MixedPrecisionPolicy(
            main_params_dtype=_dtype(op.main_params),
            main_grads_dtype=_dtype(op.main_grads),
            grad_comm_dtype=_dtype(op.grad_comm),
        ),
        **keywords,
    )
    in_place(model, wrapped)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


# The handle --------------------------------------------------------------------------------------


def optimizer(given: Optimizer) -> Optimizer:
    """An optimizer of the model's parameters, made to step with the package."""
    if not hasattr(given.param_groups[0]["params"][0], "_megatron_fsdp_model"):
        raise ValueError(
            "the optimizer has parameters that are not of this model: make it after the plan was "
            "applied"
        )
    prepared: Optimizer = prepare_optimizer(given)
    return prepared


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside add up; the next one after sums over the ranks what is left to sum.

    Where gradients are sharded each pass is reduced all the same: they add up in shards.
    """
    own = megatron_of(model)
    own.set_model_auto_sync(False)
    own.is_last_microbatch = False
    try:
        yield
    finally:
        own.is_last_microbatch = True
        own.set_model_auto_sync(True)


def installed(model: nn.Module) -> None:
    """What was read into the optimizer's weights goes on to those that the model computes with."""
    megatron_of(model).install_optimized_model_weights()


def refuse(lowered: Lowered, what: str, told: str) -> None:
    """Stops what planc does with torch's FSDP alone.

    Raises:
        PlanError: PL499, the plan has `backend = megatron`.
    """
    if called(lowered):
        raise stop("PL499", f"`{what}` is not for a model that Megatron-FSDP shards", help=told)
