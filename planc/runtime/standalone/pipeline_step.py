"""A step through a pipeline: microbatches, reductions once, tied parameters summed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planc.runtime.standalone.images import (
    ImagesError,
    Tokens,
    placeholders,
    rows_of_images,
)
from planc.runtime.standalone.passes import joined_passes
from planc.runtime.standalone.pipeline import Stages, stages_of
from planc.runtime.standalone.pipeline_schedule import Schedule
from planc.runtime.standalone.rotary import LONGEST
from planc.runtime.standalone.shards import fsdp_units, groups_of, part_of


class MicrobatchError(ValueError):
    """A batch cannot be cut into microbatches."""


def forward_backward(
    model: nn.Module,
    mesh: DeviceMesh,
    batches: Sequence[Mapping[str, Any]],
    loss: Callable[[Tensor, int, int], Tensor] | None = None,
    *,
    trains: bool = True,
) -> list[Tensor]:
    """Runs the microbatches of a step through a pipeline; gradients accumulate.

    Every rank calls it.

    Args:
        model: with the `Stages` of this rank.
        mesh: of all ranks.
        batches: that the step accumulates, each a dictionary of the arguments of the
            model's forward, rows on dim 0; equal on all stages.
        loss: maps the loss that the model returns, and the numbers of its batch and of
            its microbatch, to the part that it has in the loss of the step. By default
            it is the part, as where a batch says the number of tokens of the whole
            step, `num_items_in_batch`.
        trains: whether to run the backward passes.

    Returns:
        The loss of each microbatch on the ranks of the last stage, else nothing.

    Raises:
        MicrobatchError: a batch cannot be cut into microbatches.
    """
    stages = stages_of(model)
    assert stages is not None
    if stages.runner is None:
        stages.runner = Schedule(model, stages, mesh)
    losses: list[Tensor] = []
    rotary = model.__dict__.get(LONGEST)
    tokens = placeholders(getattr(model, "config", None))
    trained = training_passes(stages, model) if trains else nullcontext()
    with joined_passes(model), trained:
        for at, batch in enumerate(batches):
            parts = microbatches(batch, stages.microbatches, tokens)
            if rotary is not None:
                positions = batch.get("position_ids")
                rotary.least = None if positions is None else positions.max()

            def compute_loss(output: Any, number: int, at: int = at) -> Tensor:
                mean = loss_of(output)
                return mean if loss is None else loss(mean, at, number)

            losses += stages.runner.step(parts, compute_loss, trains=trains)
    return losses


def loss_of(output: Any) -> Tensor:
    """The loss that a model returns: by its name, or as the scalar of a tuple.

    Raises:
        ValueError: it returns none.
    """
    loss = getattr(output, "loss", None)
    if isinstance(output, dict):
        loss = output.get("loss")
    elif isinstance(output, tuple):
        scalars = (v for v in output if isinstance(v, Tensor) and not v.dim())
        loss = next(scalars, None)
    if loss is None:
        raise ValueError("the model returns no loss: pass it labels")
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def microbatches(
    batch: Mapping[str, Any], count: int, tokens: Tokens
) -> list[dict[str, Any]]:
    """A batch cut into parts of equally many rows, with the images of these.

    Args:
        batch: tensors have rows on dim 0; three-dimensional position ids on dim 1.
        count: the number of parts.
        tokens: what images take the place of, as of `placeholders`.

    Raises:
        MicrobatchError: the rows cannot be divided, or a tensor has no dim of rows.
    """
    tensors = {
        name: value for name, value in batch.items() if isinstance(value, Tensor)
    }
    rows = len(batch.get("input_ids", next(iter(tensors.values()))))
    if rows % count:
        text = f"a batch of {rows} rows cannot be cut into {count} microbatches"
        raise MicrobatchError(text)
    try:
        parts: list[dict[str, Any]] = [*rows_of_images(batch, count, tokens)]
    except ImagesError as error:
        raise MicrobatchError(str(error)) from error
    for name, value in batch.items():
        if name in parts[0]:
            continue
        pieces: Sequence[Any] = [value] * count
        if isinstance(value, Tensor) and value.dim():
            dim = int(name == "position_ids" and value.dim() == 3)
            if value.shape[dim] != rows:
                raise MicrobatchError(
                    f"`{name}` of shape {list(value.shape)} has no {rows} rows, so it "
                    "cannot be cut into microbatches"
                )
            pieces = value.chunk(count, dim)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


@contextmanager
def ties_summed(stages: Stages, model: nn.Module) -> Iterator[None]:
    """Sums over all ranks that hold them what passes inside add to the gradients of
    parameters that stages share; what earlier passes have added is summed already.
    """
    copies = [(p, tuple(r)) for p, r in stages.copies(model) if p.requires_grad]
    before = [parameter.grad for parameter, _ in copies]
    for parameter, _ in copies:
        parameter.grad = None
    yield
    holders = gradients_of(stages, copies)
    for (parameter, ranks), summed, count in zip(copies, before, holders, strict=True):
        here = parameter.grad is not None
        if not here:
            parameter.grad = torch.zeros_like(parameter)
        exchange(stages, part_of(parameter.grad), ranks)
        if not here and not count:  # an optimizer leaves it alone, as in one process
            parameter.grad = summed
        elif summed is not None:
            parameter.grad = summed.add_(parameter.grad)


def gradients_of(
    stages: Stages, copies: Sequence[tuple[nn.Parameter, tuple[int, ...]]]
) -> list[Tensor]:
    """The number of ranks that have a gradient of each parameter, of those that hold
    it.
    """
    counts: dict[int, Tensor] = {}
    for ranks in dict.fromkeys(ranks for _, ranks in copies):
        those = [parameter for parameter, other in copies if other == ranks]
        device = part_of(those[0]).device
        here = torch.tensor([p.grad is not None for p in those], device=device).int()
        exchange(stages, here, ranks)
        counts |= dict(zip(map(id, those), here.unbind(), strict=True))
    return [counts[id(parameter)] for parameter, _ in copies]


def exchange(stages: Stages, gradient: Tensor, ranks: Sequence[int]) -> None:
    """Adds the tensors of the other ranks that hold a parameter to a rank's own."""
    group, me = stages.mesh.get_group(), stages.mesh.get_local_rank()
    tensors = [gradient if rank == me else torch.empty_like(gradient) for rank in ranks]
    works = distributed.batch_isend_irecv(
        [
            distributed.P2POp(how, tensor, group=group, group_peer=rank)
            for rank, other in zip(ranks, tensors, strict=True)
            if rank != me
            for how, tensor in (
                (distributed.isend, gradient),
                (distributed.irecv, other),
            )
        ]
    )
    for work in works:
        work.wait()
    # in one order on all ranks, so that their sums are equal to the bit
    gradient.copy_(sum(tensors[1:], tensors[0]))


@contextmanager
def training_passes(stages: Stages, model: nn.Module) -> Iterator[None]:
    """Reduces the gradients of the passes inside once, and sums those of both ends."""
    with ties_summed(stages, model), reduced_once(model):
        yield


@contextmanager
def reduced_once(model: nn.Module) -> Iterator[None]:
    """FSDP units reduce the gradients of all microbatches once, at the end.

    As `torch.distributed.pipelining` does it for a stage that is an FSDP unit
    (`perform_reduce_grad`).
    """
    units = fsdp_units(model)
    for unit in units:
        set_reduction(unit, False)
    yield
    states = {id(state): state for unit in units for state in [unit._get_fsdp_state()]}
    for unit in units:
        set_reduction(unit, True)
    for unit in units:
        for group in groups_of(unit):
            group.post_backward()
    for state in states.values():
        if state._is_root:
            state._root_post_backward_final_callback()


def set_reduction(unit: Any, now: bool) -> None:
    """Whether a unit reduces its gradients, and reshards, after a backward pass."""
    unit.set_requires_gradient_sync(now, recurse=False)
    unit.set_reshard_after_backward(now, recurse=False)
    unit.set_is_last_backward(now)
