"""Runs a lowered plan on a model: exactly the operations of the list, in its order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import assert_never

import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from planc.diagnostic import PlanError
from planc.lowering.ops import (
    AnyOp,
    Checkpoint,
    Compile,
    Configure,
    FullyShard,
    Lowered,
    Parallelize,
    Tie,
)
from planc.runtime import agree
from planc.runtime.handle import Run
from planc.runtime.meshes import Meshes, device_of, start
from planc.runtime.styles import build

_log = logging.getLogger("planc")


def apply_lowered(
    model: nn.Module,
    lowered: Lowered,
    *,
    digest: str,
    device_type: str | None = None,
    describe: Callable[[], str] | None = None,
) -> Run:
    """Spreads a model over the ranks of this run, in place.

    Args:
        model: on meta, CPU or CUDA, and not parallel yet.
        lowered: the operations.
        digest: of `lowered`; all ranks must have the same.
        device_type: `cpu` or `cuda`; by default where the model is.
        describe: gives the text of `Run.describe`.

    Raises:
        PlanError: PL490 (world size), PL491 (digests differ), PL493 (parallel already), PL494
            (another model), all before the model is touched; PL492 (torch refused an operation).
    """
    began = time.perf_counter()
    device = device_of(model, device_type)
    start(device)
    agree.world(lowered)
    modules: dict[str, nn.Module] = {}
    problem = None
    try:
        modules = agree.fits(model, lowered)
    except PlanError as error:
        problem = error
    agree.same(digest, problem)
    meshes = Meshes(lowered, device)
    for op in lowered.ops:
        try:
            _run(op, model, modules, meshes)
        except Exception as error:
            raise _refused(op, error) from error
    if distributed.get_rank() == 0:
        taken = time.perf_counter() - began
        shape = " | ".join(f"{a.name} {a.size}" for a in lowered.axes)
        _log.info(
            "plan %s (%s) applied to %s on %s in %.2f s",
            *(lowered.plan, digest[:12], lowered.model, shape, taken),
        )
    return Run(
        model=model,
        lowered=lowered,
        digest=digest,
        meshes=meshes,
        text=describe or (lambda: f"{lowered.plan} for {lowered.model}, {digest[:12]}"),
    )


def _refused(op: AnyOp, error: Exception) -> PlanError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    names = ", ".join(str(m) for m in agree.members_of(op))
    where = f" ({op.place})" if op.place else ""
    message = f"torch refused {type(op).__name__.lower()} of {names or 'the model'}{where}: {first}"
    return agree.stop("PL492", message)


def _run(op: AnyOp, model: nn.Module, modules: dict[str, nn.Module], meshes: Meshes) -> None:
    """One operation. `modules` follows the model: a wrapped module stands under its old name."""
    match op:
        case Configure():
            setattr(model.config, op.name, op.value)
        case Parallelize():
            mesh, style = meshes.part(op.axis), build(op.style)
            for name in op.modules.names():
                parallelize_module(modules[name], mesh, style)
        case Tie():
            (owner, _, name), (source, _, other) = (
                path.rpartition(".") for path in (op.parameter, op.source)
            )
            setattr(modules[owner], name, getattr(modules[source], other))
        case Checkpoint():
            for name in op.modules.names():
                parent, _, last = name.rpartition(".")
                wrapped = checkpoint_wrapper(
                    modules[name], checkpoint_impl=CheckpointImpl.NO_REENTRANT
                )
                modules[parent].register_module(last, wrapped)
                modules[name] = wrapped
        case Compile():
            for name in op.modules.names():
                modules[name].compile(fullgraph=op.fullgraph)
        case FullyShard():
            _shard(op, modules, meshes)
        case _:
            assert_never(op)


def _shard(op: FullyShard, modules: dict[str, nn.Module], meshes: Meshes) -> None:
    mesh = meshes.data(op.shard, op.replicate)
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(op.param),
        reduce_dtype=_dtype(op.reduce),
        output_dtype=_dtype(op.output),
        cast_forward_inputs=op.cast_inputs,
    )
    names = [name for members in op.members for name in members.names()]
    units = [[modules[n] for n in names]] if op.group else [modules[n] for n in names]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=op.reshard)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
