"""Methods of `Run` for a training loop: accumulation, inference, full weights."""

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from planc.runtime.preconditions import stop
from planc.runtime.script_line import script_line
from planc.runtime.script_optimizers import require_uncoupled, require_whole_steps
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone import shards
from planc.runtime.standalone.loss import IGNORED
from planc.runtime.standalone.passes import joined_passes, reset_failed_pass
from planc.runtime.standalone.pipeline import Stages, stages_of
from planc.runtime.standalone.shards import fsdp_units, groups_of


def require_current(
    model: nn.Module, optimizer: Optimizer, replaced: Iterable[weakref.ref[nn.Parameter]]
) -> None:
    """Refuses an optimizer of parameters that the plan has replaced: no gradient reaches them, so
    its steps would change nothing.

    Args:
        model: after the plan was applied.
        optimizer: of its parameters.
        replaced: the parameters that the model had before the plan and has no longer.

    Raises:
        PlanError: PL486; PL464, its states are on meta; PL465, it steps shards otherwise; PL423,
            it couples the stages of a pipeline.
    """
    name = type(optimizer).__name__
    states = (value for state in optimizer.state.values() for value in state.values())
    if any(isinstance(value, Tensor) and value.is_meta for value in states):
        raise stop(
            "PL464",
            f"{name} has made its states on the meta device, where they have no values",
            *script_line("the optimizer arrives here"),
            help="create it after `run.load`",
        )
    kept = {id(parameter) for parameter in model.parameters()}
    gone = {id(known) for each in replaced if (known := each()) is not None} - kept
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if count := sum(id(parameter) in gone for parameter in stepped):
        raise stop(
            "PL486",
            f"{count} of the {len(stepped)} parameters of the optimizer are no longer in the model:"
            " the plan has replaced them",
            *script_line("the optimizer arrives here"),
            help="create the optimizer after `planc.apply`",
        )
    require_whole_steps(optimizer)
    if stages_of(model) is not None:
        require_uncoupled(optimizer)


def required_rate(optimizer: Optimizer | None, lr: float | None, *, planned: bool) -> float:
    """The learning rate of the plan's optimizer; refuses an optimizer of the script beside it, and
    neither of the two.

    Raises:
        PlanError: PL580.
    """
    if optimizer is None and lr is not None and planned:
        return lr
    message = "the plan has no optimizer section, and no optimizer is given"
    help = "pass one of `model.parameters()`, or add an optimizer section to the plan"
    if planned:
        given = optimizer is not None
        message = "the plan has an optimizer section, and "
        message += "the script brings one of its own" if given else "no learning rate is given"
        help = "call `run.optimizer(lr=..., weight_decay=...)`"
        help += "; or remove the section" if given else ""
    raise stop("PL580", message, *script_line("the optimizer is asked for here"), help=help)


@contextmanager
def no_sync(model: nn.Module, *, whole: bool = False) -> Iterator[None]:
    """Backward passes inside accumulate gradients; the first one after it reduces the rest.

    Args:
        model: after the plan was applied.
        whole: whether sharded units too keep whole gradients, which saves communication and costs
            memory. Otherwise they reduce theirs in each pass, as without this, and keep shards.
    """
    every = [u for u in fsdp_units(model) if whole or all(_shards(g) < 2 for g in groups_of(u))]
    for unit in every:
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in every:
            unit.set_requires_gradient_sync(True, recurse=False)


def clear_unreduced(owner: nn.Module | Optimizer, model: nn.Module) -> None:
    """Makes `owner.zero_grad` clear what `no_sync` keeps too: gradients that are not reduced yet
    are no gradient of a parameter that the owner knows, and the next step would add them.
    """
    plain = owner.zero_grad

    @functools.wraps(plain)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        reset_failed_pass(model)  # else modules list unsharded parameters
        plain(*args, **kwargs)
        groups = owner.param_groups if isinstance(owner, Optimizer) else []
        owned = {id(p) for group in groups for p in group["params"]}
        for unit in fsdp_units(model):
            for each in (p for group in groups_of(unit) for p in group.fsdp_params):
                if owner is model or id(each.sharded_param) in owned:
                    each.unsharded_accumulated_grad = None
                    if hasattr(each, "_unsharded_param"):
                        each._unsharded_param.grad = None

    owner.zero_grad = zero_grad


def num_items_in_batch(counts: Sequence[Tensor], mesh: DeviceMesh | None) -> Tensor:
    """The valid labels of all data ranks, over the number of data ranks: [] in float32.

    Args:
        counts: the valid labels of each pass of this rank.
        mesh: of the data ranks.
    """
    return mean_over(torch.stack(list(counts)).sum().float(), mesh)


def valid_labels(labels: Tensor, *, shifted: bool = True, ignored: int = IGNORED) -> Tensor:
    """The labels that count: [rows, length], or one for each row.

    Args:
        labels: of tokens or rows.
        shifted: whether the first of a row is left out, which a causal model does not predict.
        ignored: the label that does not count.
    """
    return ((labels[..., 1:] if shifted and labels.dim() > 1 else labels) != ignored).sum()


def mean_over(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The mean of a number of each rank of a mesh, in place where there are several."""
    if mesh is None:
        return value
    value = value.to(mesh.device_type)
    if mesh.size() > 1:
        distributed.all_reduce(value, group=mesh.get_group())
    return value / mesh.size()


def most(values: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The largest of each number over the ranks of a mesh."""
    if mesh is not None and mesh.size() > 1:
        values = values.to(mesh.device_type)
        distributed.all_reduce(values, distributed.ReduceOp.MAX, group=mesh.get_group())
    return values


@contextmanager
def unshard(model: nn.Module) -> Iterator[None]:
    """All-gathers the parameters of every unit once, for any number of forward passes inside.

    Every rank must enter and leave it. Backward passes inside are not supported.
    """
    sharded = [unit for unit in fsdp_units(model) if all(map(_shards, groups_of(unit)))]
    before = [(g, g.post_forward_mesh_info) for unit in sharded for g in groups_of(unit)]
    states = [unit._get_fsdp_state() for unit in sharded]
    automatic = [(state, state._auto_reshard_after_forward) for state in states]
    with joined_passes(model):
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


def _shards(group: Any) -> int:
    """The number of ranks that a parameter group is sharded over; 0 for a replicated one, which
    needs no all-gather.
    """
    return getattr(group.mesh_info, "shard_mesh_size", 0)


# Full weights ------------------------------------------------------------------------------------


def full_state_dict(model: nn.Module, *, every_rank: bool = False) -> dict[str, Tensor]:
    """The full state dict on the CPU, all-gathered one tensor at a time; every rank must call it.

    Args:
        model: sharded or not.
        every_rank: whether all ranks get it; otherwise rank 0 gets it and others an empty dict.

    Returns:
        Tensors by their names before anything was wrapped; a tied tensor has each of its names.
        Compressed weights are left out, because their bytes have no meaning without their scales.
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
    names = dict.fromkeys((*stages.names, *found))  # a script may have added parameters since
    return {name: found[name] for name in names if name in found} if keep else {}


def on_rank_0(own: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors of all stages on rank 0, on the CPU; empty elsewhere. Every rank calls it.

    Args:
        own: whole tensors of this rank's stages, on the CPU.
        model: whose stages these are; without stages rank 0 has all.
    """
    stages = stages_of(model)
    if stages is not None:
        if 0 not in distributed.get_process_group_ranks(stages.mesh.get_group()):
            return {}
        own = _of_all_stages(own, stages)
    return own if distributed.get_rank() == 0 else {}


def _of_all_stages(own: dict[str, Tensor], stages: Stages) -> dict[str, Tensor]:
    """The tensors of all stages on the CPU, each sent by the first stage that has it."""
    group, device = stages.mesh.get_group(), stages.mesh.device_type
    forms: list[Any] = [None] * stages.mesh.size()
    mine = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    distributed.all_gather_object(forms, mine, group=group)
    found: dict[str, Tensor] = {}
    for rank, form in enumerate(forms):
        for name, (shape, dtype) in form.items():
            if name not in found:
                here = rank == stages.mesh.get_local_rank()
                sent = own[name] if here else torch.empty(shape, dtype=dtype)
                sent = sent.to(device)
                distributed.broadcast(sent, group=group, group_src=rank)
                found[name] = sent.cpu()
    return found
