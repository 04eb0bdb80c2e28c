"""The loop that serves every plan: forward and backward passes of accumulated batches.

The gradients of a step are those of the mean loss over all its tokens: of all microbatches, all
accumulated batches and all data ranks, however unevenly ignored labels are spread over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planc.ops.lowered import Lowered
from planc.runtime import gradients
from planc.runtime.context import sequence_parts
from planc.runtime.preconditions import stop
from planc.runtime.same_inputs import FirstPasses
from planc.runtime.script_line import script_line
from planc.runtime.standalone.pipeline import Stages, stages_of
from planc.runtime.standalone.pipeline_step import (
    MicrobatchError,
    forward_backward,
    loss_of,
    microbatches,
)

Batch = Mapping[str, Any]
"""The arguments of the model's forward, rows outermost."""
_COUNT = "num_items_in_batch"


class RunParts(Protocol):
    """The parts of a `planc.runtime.run.Run` that a step uses."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def lowered(self) -> Lowered: ...

    @property
    def first(self) -> FirstPasses: ...

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def data_mesh(self) -> DeviceMesh | None: ...

    @property
    def loss_mesh(self) -> DeviceMesh | None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def batch(self, batch: Batch) -> dict[str, Any]: ...


class TrainingStep:
    """The steps of one run.

    Args:
        counts: whether the model's loss divides by a given number of tokens; None until it ran.
    """

    def __init__(self) -> None:
        self.counts: bool | None = None

    def run(self, run: RunParts, batches: Sequence[Batch], *, trains: bool) -> Tensor:
        """The passes of a step; returns the mean loss over all ranks, a scalar on every rank.

        Args:
            run: the handle of the run.
            batches: of this rank, of one step.
            trains: whether gradients are computed and accumulated.
        """
        _require_as_many(batches, run.mesh.device_type)
        if trains:
            run.first.labels_counted()
        parts = sequence_parts(run.lowered)
        count = _items(run, batches) / parts
        stages = stages_of(run.model)
        with _counting(run.model, self):
            if stages is None:
                total = self._plain(run, batches, count, trains)
            else:
                total = self._pipelined(run, stages, batches, count, trains)
        total = total.detach().float()
        if stages is not None:
            distributed.all_reduce(total, group=stages.mesh.get_group())
        return gradients.mean_over(total, run.data_mesh if parts == 1 else run.loss_mesh)

    def _plain(
        self, run: RunParts, batches: Sequence[Batch], count: Tensor, trains: bool
    ) -> Tensor:
        losses = []
        for at, batch in enumerate(batches):
            last = at == len(batches) - 1
            with nullcontext() if last or not trains else run.no_sync():
                loss = loss_of(run.model(**run.batch(batch), **self._given(run, count)))
                loss = self._part(run, loss, batch, count)
                if trains:
                    loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _pipelined(
        self, run: RunParts, stages: Stages, batches: Sequence[Batch], count: Tensor, trains: bool
    ) -> Tensor:
        given = [{**run.batch(batch), **self._given(run, count)} for batch in batches]

        def part(loss: Tensor, at: int, number: int) -> Tensor:
            return self._part(run, loss, whole[at][number], count)

        try:
            whole = [microbatches(batch, stages.microbatches) for batch in batches]
            losses = forward_backward(run.model, run.mesh, given, part, trains=trains)
        except MicrobatchError as error:
            raise stop(
                "PL488",
                str(error),
                *script_line("the batch arrives here"),
                help="the rows of each data rank, on dim 0, must be a multiple of `microbatches`",
            ) from error
        if not losses:
            return torch.zeros((), device=run.mesh.device_type)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _given(self, run: RunParts, count: Tensor) -> dict[str, Any]:
        takes = hasattr(run.model, "loss_function") and self.counts is not False
        return {_COUNT: count} if takes else {}

    def _part(self, run: RunParts, loss: Tensor, batch: Batch, count: Tensor) -> Tensor:
        """The part of the step's loss that a pass has: the sum of its tokens over all; the batch is
        that of all ranks which share its sequences.
        """
        if self.counts:
            return loss
        valid = _valid(batch).to(count.device) / sequence_parts(run.lowered)
        return loss * (valid / count)


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
        if kwargs.get(_COUNT) is None:
            return plain(*args, **kwargs)
        with torch.no_grad():  # first, while nothing is kept for backward: logits are large
            other = plain(*args, **{**kwargs, _COUNT: 2 * kwargs[_COUNT]})
        loss = plain(*args, **kwargs)
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


def _require_as_many(batches: Sequence[Batch], device_type: str) -> None:
    """Checks that a step has as many passes on every rank, for the passes of all ranks meet in
    collectives: a data loader that ends earlier on one of them leaves the others waiting for ever.

    Raises:
        PlanError: PL469, on every rank.
        ValueError: there is no batch on any rank.
    """
    own = len(batches)
    both = torch.tensor([own, -own], device=device_type)
    if distributed.get_world_size() > 1:
        distributed.all_reduce(both, distributed.ReduceOp.MAX)
    most, least = both.abs().tolist()
    if most != least:
        raise stop(
            "PL469",
            f"the ranks pass {least} to {most} batches in one step; "
            f"rank {distributed.get_rank()} passes {own}",
            *script_line("the batches arrive here"),
            help="give every rank equally many: a sampler with `drop_last=True`, or a last step "
            "that all ranks leave out",
        )
    if not most:
        raise ValueError("a step has at least one batch")


def _items(run: RunParts, batches: Sequence[Batch]) -> Tensor:
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
