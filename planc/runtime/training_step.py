"""The loop that serves every plan: forward and backward passes of accumulated batches.

The gradients of a step are those of the mean loss over all its tokens: of all microbatches, all
accumulated batches and all data ranks, however unevenly ignored labels are spread over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from planc.runtime import gradients
from planc.runtime.context import sequence_parts
from planc.runtime.pipeline import Pipeline
from planc.runtime.preconditions import stop
from planc.runtime.sharded_tensors import fsdp_units
from planc.runtime.standalone.pipeline import Stages, stages_of
from planc.runtime.standalone.shards import groups_of, part_of

if TYPE_CHECKING:
    from planc.runtime.run import Run

Batch = Mapping[str, Any]
"""The arguments of the model's forward, rows outermost."""
_COUNT = "num_items_in_batch"
_COLUMNS = "position_ids"
"""Three-dimensional position ids have rows on dim 1 (mRoPE)."""


class TrainingStep:
    """The steps of one run.

    Args:
        counts: whether the model's loss divides by a given number of tokens; None until it ran.
    """

    def __init__(self) -> None:
        self.counts: bool | None = None
        self.pipeline: Pipeline | None = None

    def run(self, run: Run, batches: Sequence[Batch], *, trains: bool) -> Tensor:
        """The passes of a step; returns the mean loss over all ranks, a scalar on every rank.

        Args:
            run: the handle of the run.
            batches: of this rank, of one step.
            trains: whether gradients are computed and accumulated.
        """
        if not batches:
            raise ValueError("a step has at least one batch")
        parts = sequence_parts(run.lowered)
        count = _items(run, batches) / parts
        batches = [run.batch(batch) for batch in batches]
        stages = stages_of(run.model)
        with _counting(run.model, self):
            if stages is None:
                total = self._plain(run, batches, count, trains)
            else:
                total = self._pipelined(run, stages, batches, count, trains)
        total = total.detach().float()
        if stages is not None:
            distributed.all_reduce(total, group=stages.mesh.get_group())
        mesh = run.data_mesh if parts == 1 else run.loss_mesh
        if mesh is not None and mesh.size() > 1:
            distributed.all_reduce(total, group=mesh.get_group())
            total = total / mesh.size()
        return total

    def _plain(self, run: Run, batches: Sequence[Batch], count: Tensor, trains: bool) -> Tensor:
        losses = []
        for at, batch in enumerate(batches):
            last = at == len(batches) - 1
            with nullcontext() if last or not trains else run.no_sync():
                loss = self._loss(run.model(**batch, **self._given(run, count)), batch, count)
                if trains:
                    loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _pipelined(
        self, run: Run, stages: Stages, batches: Sequence[Batch], count: Tensor, trains: bool
    ) -> Tensor:
        if self.pipeline is None:
            self.pipeline = Pipeline(run.model, stages, run.meshes)
        losses: list[Tensor] = []
        with _reduced_once(run.model) if trains else nullcontext():
            for batch in batches:
                parts = microbatches(batch, stages.microbatches)
                given = [{**part, **self._given(run, count)} for part in parts]
                losses += self.pipeline.step(
                    given,
                    lambda output, i, parts=parts: self._loss(output, parts[i], count),
                    trains=trains,
                )
        if trains:
            _sum_ties(stages, run.model)
        if not losses:
            return torch.zeros((), device=run.mesh.device_type)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _given(self, run: Run, count: Tensor) -> dict[str, Any]:
        takes = hasattr(run.model, "loss_function") and self.counts is not False
        return {_COUNT: count} if takes else {}

    def _loss(self, output: Any, batch: Batch, count: Tensor) -> Tensor:
        """The part of the step's loss that a pass has: its tokens' sum over all tokens."""
        loss = output[0] if isinstance(output, tuple) else output.loss
        if loss is None:
            raise ValueError("the model returns no loss: pass it labels")
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        if self.counts:
            return loss
        return loss * (_valid(batch).to(count.device) / count)


def _sum_ties(stages: Stages, model: nn.Module) -> None:
    """The gradients of parameters that the first and the last stage share become their sum."""
    for parameter in stages.copies(model).values():
        if parameter.grad is None:
            continue
        own = part_of(parameter.grad)
        other = torch.empty_like(own)
        group = stages.mesh.get_group()
        peer = stages.mesh.size() - 1 - stages.mesh.get_local_rank()
        works = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, own, group=group, group_peer=peer),
                distributed.P2POp(distributed.irecv, other, group=group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()
        # in one order on both ranks, so that their sums are equal to the bit
        first, second = (own, other) if peer else (other, own)
        own.copy_(first + second)


@contextmanager
def _counting(model: nn.Module, step: TrainingStep) -> Iterator[None]:
    """Finds out whether the model's loss divides by the number of items that it is given: twice the
    number gives another loss. A pass without valid labels, whose loss is 0, decides nothing.
    """
    plain = getattr(model, "loss_function", None)
    if plain is None or step.counts is not None:
        step.counts = bool(step.counts)
        yield
        return

    def noted(*args: Any, **kwargs: Any) -> Any:
        loss = plain(*args, **kwargs)
        if kwargs.get(_COUNT) is not None:
            with torch.no_grad():
                other = plain(*args, **{**kwargs, _COUNT: 2 * kwargs[_COUNT]})
            if _whole(loss).any():
                step.counts = not torch.equal(_whole(loss), _whole(other))
        return loss

    model.loss_function = noted
    try:
        yield
    finally:
        model.loss_function = plain


def _whole(loss: Tensor) -> Tensor:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()


def _items(run: Run, batches: Sequence[Batch]) -> Tensor:
    """The valid labels of all data ranks over the number of data ranks, as
    `run.num_items_in_batch`.
    """
    count = torch.stack([_valid(batch) for batch in batches]).sum().float()
    return gradients.mean_over(count, run.data_mesh)


def _valid(batch: Batch) -> Tensor:
    """The labels that count; rows, where there are no labels of tokens."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return gradients.valid_labels(labels)
    first = next(value for value in batch.values() if isinstance(value, Tensor))
    return torch.tensor(float(len(first)))


def microbatches(batch: Batch, count: int) -> list[dict[str, Any]]:
    """A batch cut into parts of equally many rows.

    Args:
        batch: tensors have rows on dim 0; three-dimensional position ids on dim 1.
        count: the number of parts.

    Raises:
        PlanError: PL488, the rows cannot be divided, or a tensor has no dim of rows.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    rows = len(next(iter(tensors.values())))
    if rows % count:
        raise stop(
            "PL488",
            f"a batch of {rows} rows cannot be cut into {count} microbatches",
            help="the rows of each data rank must be a multiple of `microbatches`",
        )
    parts: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in batch.items():
        pieces: Sequence[Any] = [value] * count
        if isinstance(value, Tensor) and value.dim():
            dim = int(name == _COLUMNS and value.dim() == 3)
            if value.shape[dim] != rows:
                raise stop(
                    "PL488",
                    f"`{name}` of shape {list(value.shape)} has no {rows} rows, so it cannot be "
                    "cut into microbatches",
                    help="every tensor of a batch has the rows on its first dim",
                )
            pieces = value.chunk(count, dim)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


@contextmanager
def _reduced_once(model: nn.Module) -> Iterator[None]:
    """FSDP units keep their gradients through all microbatches and reduce them once, at the end.

    As `torch.distributed.pipelining` does it for a stage that is an FSDP unit
    (`perform_reduce_grad`).
    """
    every = fsdp_units(model)
    for unit in every:
        _reduces(unit, False)
    yield
    states = {id(state): state for unit in every for state in [unit._get_fsdp_state()]}
    for unit in every:
        _reduces(unit, True)
    for unit in every:
        for group in groups_of(unit):
            group.post_backward()
    for state in states.values():
        if state._is_root:
            state._root_post_backward_final_callback()


def _reduces(unit: Any, now: bool) -> None:
    unit.set_requires_gradient_sync(now, recurse=False)
    unit.set_reshard_after_backward(now, recurse=False)
    unit.set_is_last_backward(now)
