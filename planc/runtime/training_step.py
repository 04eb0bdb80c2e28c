"""The loop that serves every plan: forward and backward passes of accumulated batches.

The gradients of a step are those of the mean loss over all its tokens: of all microbatches, all
accumulated batches and all data ranks, however unevenly ignored labels are spread over them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planc.ops.lowered import Lowered
from planc.runtime import gradients
from planc.runtime.counted_labels import (
    GIVEN_NEXT,
    NEXT,
    PLAIN,
    UNCLEAR,
    UNSEEN,
    LabelRule,
    SeenLabels,
    labels_of,
    rule_of,
    takes_next_labels,
)
from planc.runtime.metrics import Meter
from planc.runtime.preconditions import stop, warning
from planc.runtime.safeguards.changes import ModelChanges
from planc.runtime.safeguards.inputs import PassComparison
from planc.runtime.safeguards.stage_statistics import (
    GRADIENTS,
    WEIGHTS,
    end_observation,
    observe_statistics,
)
from planc.runtime.script_line import script_line
from planc.runtime.standalone.images import placeholders
from planc.runtime.standalone.pipeline import Stages, stages_of
from planc.runtime.standalone.pipeline_step import (
    MicrobatchError,
    forward_backward,
    loss_of,
    microbatches,
)
from planc.runtime.standalone.rotary import LONGEST

Batch = Mapping[str, Any]
"""The arguments of the model's forward, rows outermost."""
_COUNT = "num_items_in_batch"


class RunParts(Protocol):
    """The parts of a `planc.runtime.run.Run` that a step uses; none is assigned to."""

    lowered: Final[Lowered]  # type: ignore[misc]  # a run assigns its value

    @property
    def model(self) -> nn.Module: ...

    @property
    def first(self) -> PassComparison: ...

    @property
    def changes(self) -> ModelChanges | None: ...

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def data_mesh(self) -> DeviceMesh | None: ...

    @property
    def loss_mesh(self) -> DeviceMesh | None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def batch(self, batch: Batch) -> dict[str, Any]: ...


class TrainingStep:
    """Runs the training steps of one run.

    The first passes show how the model's loss is normalized: whether it divides by a given number
    of tokens (`counts`), or else over which labels it is a mean (`rule`). The data-parallel ranks
    share what they observe. Until then they use what the model's class states.
    """

    def __init__(self) -> None:
        self.counts: bool | None = None
        self.rule: LabelRule | None = None
        self.settled = False
        self.ranged = False
        self.seen_counts: bool | None = None  # on this rank
        self.called = False  # the model's own `loss_function`
        self.labels = SeenLabels()
        self.items = torch.zeros(())
        self.meter: Meter | None = None

    def run(
        self, run: RunParts, batches: Sequence[Batch], *, trains: bool, passes: int | None
    ) -> Tensor:
        """Runs the gradient accumulation steps; returns the mean loss of all ranks as a scalar.

        Args:
            batches: the batches of this rank in one step.
            trains: whether gradients are computed and accumulated.
            passes: the number of passes of every rank; None for the number of batches. A rank with
                fewer batches repeats its last one, with weight 0.
        """
        if (observed := end_observation()) is not None:
            observed.require(WEIGHTS)
        meter = self.meter if trains else None
        if meter:
            meter.begin()
        _require_as_many(batches, passes, run.mesh.device_type)
        padded = [*batches, *[batches[-1]] * ((passes or 0) - len(batches))]
        if trains:
            run.first.labels_counted()
            self._require_range(run)
        parts = run.lowered.sequence_parts
        self.items = _items(run, batches, self._rule(run.model))
        stages = stages_of(run.model)
        if stages is not None and run.changes is not None:
            run.changes.require()  # before torch looks at the parameters
        rotary = run.model.__dict__.get(LONGEST)
        lengths = rotary.of_all_ranks() if rotary else nullcontext()
        with lengths, self.observe(run):
            if stages is None:
                total = self._plain(run, batches, padded, trains)
            else:
                total = self._run_pipeline(run, stages, batches, padded, trains)
        total = total.detach().float()
        if stages is not None:
            distributed.all_reduce(total, group=stages.mesh.get_group())
        if meter:
            meter.count(batches, len(batches))
            meter.settle()
        total = gradients.mean_over(total, run.data_mesh if parts == 1 else run.loss_mesh)
        if stages is not None:
            observe_statistics(run.model, stages, *[GRADIENTS] * trains, WEIGHTS)
        return total

    def begin(self, run: RunParts, batches: Sequence[Batch]) -> None:
        """Counts the labels of a step whose passes another loop runs. Every rank calls it.

        The model does not receive the number of labels.
        """
        self.seen_counts = False
        self.items = _items(run, batches, self._rule(run.model))

    def observe(self, run: RunParts) -> AbstractContextManager[None]:
        """Returns a context that observes which labels the loss of a forward pass is a mean of."""
        return _observe_loss(run.model, self, compiled=bool(run.lowered.compilations))

    def weigh(self, run: RunParts, loss: Tensor, batch: Batch, batches: Sequence[Batch]) -> Tensor:
        """Scales the loss of an observed pass to its share of the step that `begin` counted."""
        return self._part(run, loss, batch, batches)

    def _require_range(self, run: RunParts) -> None:
        """Refuses gradients in float16, which are zero below 6e-8: planc does not scale losses.

        Raises:
            PlanError: PL570.
        """
        if self.ranged:
            return
        self.ranged = True
        units = run.lowered.fsdp_units
        dtypes = (p.dtype for p in run.model.parameters() if p.requires_grad)
        stated = any("float16" in (op.param, op.reduce) for op in units)
        casts = any(op.param not in (None, "float16") for op in units)
        if stated or (not casts and torch.float16 in dtypes):
            raise stop(
                "PL570",
                "gradients are computed or reduced in fp16, and planc scales no loss, so that "
                "small ones become zero",
                *script_line("the step is here"),
                help="bf16 has the range of fp32: `precision(param = bf16)`; or scale the loss, "
                "over all ranks, in a loop of your own",
            )

    def _plain(
        self, run: RunParts, batches: Sequence[Batch], padded: Sequence[Batch], trains: bool
    ) -> Tensor:
        losses = []
        for at, batch in enumerate(padded):
            last = at == len(padded) - 1
            if self.meter:
                self.meter.counting = at < len(batches)
            with nullcontext() if last or not trains else run.no_sync():
                loss = loss_of(run.model(**run.batch(batch), **self._loss_arguments(run)))
                loss = self._part(run, loss, batch, batches)
                loss = loss if at < len(batches) else loss * 0
                if trains:
                    loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _run_pipeline(
        self,
        run: RunParts,
        stages: Stages,
        batches: Sequence[Batch],
        padded: Sequence[Batch],
        trains: bool,
    ) -> Tensor:
        given = [{**run.batch(batch), **self._loss_arguments(run)} for batch in padded]

        def part(loss: Tensor, at: int, number: int) -> Tensor:
            loss = self._part(run, loss, whole[at][number], batches)
            return loss if at < len(batches) else loss * 0

        try:
            tokens = placeholders(getattr(run.model, "config", None))
            whole = [microbatches(batch, stages.microbatches, tokens) for batch in padded]
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

    def _loss_arguments(self, run: RunParts) -> dict[str, Any]:
        takes = hasattr(run.model, "loss_function") and self.counts is not False
        return {_COUNT: self.items} if takes else {}

    def _part(self, run: RunParts, loss: Tensor, batch: Batch, batches: Sequence[Batch]) -> Tensor:
        """The part of the step's loss that a pass has: the sum of its tokens over all; the batches
        are those of all ranks which share their sequences.
        """
        if not self.settled:
            self._settle(run, batch, batches)
        if self.counts:
            return loss
        valid = self._rule(run.model).count(batch).to(self.items.device)
        share = valid / run.lowered.sequence_parts / self.items
        return torch.where(valid > 0, loss * share, 0.0)  # the mean over no label is no number

    def _rule(self, model: nn.Module) -> LabelRule:
        """The label rule that passes have shown, else an assumed one: a user's model predicts each
        of its labels.
        """
        if self.rule is None and not hasattr(model, "loss_function"):
            return LabelRule(shifted=False, takes_next=takes_next_labels(model))
        return self.rule or rule_of(model)

    def _settle(self, run: RunParts, batch: Batch, batches: Sequence[Batch]) -> None:
        """Shares among data-parallel ranks how the model's loss counted labels in this pass.

        If no rank could see it, the next pass may show it. If the rule has changed, the labels of
        the step are counted again.
        """
        whole = run.lowered.sequence_parts == 1
        shown, ignored = self.labels.shown(batch if whole else {})
        if self.called and self.seen_counts is None:  # the loss was 0
            shown = UNCLEAR
        counted = [self.seen_counts is True, self.seen_counts is False]
        local_counts = torch.tensor([shown, ignored if shown else -(2**62), *counted])
        shown, ignored, counts, ignores = gradients.most(local_counts, run.data_mesh).tolist()
        self.counts = bool(counts) if counts or ignores else None
        self.settled = bool(counts) or shown != UNCLEAR
        if self.counts or not whole:
            return
        if shown == UNSEEN and labels_of(batch) is not None:
            warning(
                "PL515",
                f"the loss of {type(run.model).__name__} calls no `cross_entropy` that is the mean "
                "over the labels of the batch, so each pass is weighed by its labels that are not "
                f"{self._rule(run.model).ignored}",
                *script_line("the batches arrive here"),
                help="where it is the mean over other labels, write the passes out and divide the "
                "sum of its loss by `run.num_items_in_batch(*labels)`",
                stages=stages_of(run.model),
            )
        if shown:
            rule = self._rule(run.model)
            if self.settled:
                takes_next = shown == GIVEN_NEXT or (shown == NEXT and rule.takes_next)
                rule = LabelRule(shifted=shown != PLAIN, takes_next=takes_next)
            self.rule = replace(rule, ignored=ignored)
            self.items = _items(run, batches, self._rule(run.model))


@contextmanager
def _observe_loss(model: nn.Module, step: TrainingStep, *, compiled: bool) -> Iterator[None]:
    """Finds out whether the model's loss divides by the number of items that it is given: twice the
    number gives another loss. A pass without valid labels, whose loss is 0, decides nothing.
    Otherwise notes the labels that it is the mean of; compiled blocks would be compiled for that
    once more, so there only the loss is watched, unless the model has it inside.
    """
    plain = getattr(model, "loss_function", None)
    if step.settled:
        yield
        return
    if plain is None:
        with step.labels:
            yield
        return

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        step.called = True
        if kwargs.get(_COUNT) is None:
            with step.labels:
                return plain(*args, **kwargs)
        with torch.no_grad():  # first, while nothing is kept for backward: logits are large
            other = plain(*args, **{**kwargs, _COUNT: 2 * kwargs[_COUNT]})
        with step.labels:
            loss = plain(*args, **kwargs)
        if _full_loss(loss).any():
            step.seen_counts = not torch.equal(_full_loss(loss), _full_loss(other))
        return loss

    model.loss_function = call
    try:
        with nullcontext() if compiled else step.labels:
            yield
    finally:
        model.loss_function = plain


def _full_loss(loss: Tensor) -> Tensor:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()


def _require_as_many(batches: Sequence[Batch], passes: int | None, device_type: str) -> None:
    """Checks that every rank has the same number of passes in a step, and rows in each.

    Every pass has collectives, so a rank with fewer passes would leave the others waiting forever.

    Raises:
        PlanError: PL469, on every rank.
        ValueError: there is no batch on any rank, or on all more than there are passes.
    """
    count, of = len(batches), ""
    if passes is not None:
        count, of = (passes if 0 < count <= passes else 0), f" of {passes} passes"
    empty = sum(not _has_rows(batch) for batch in batches)
    numbers = torch.tensor([count, -count, empty], device=device_type)
    if distributed.get_world_size() > 1:
        distributed.all_reduce(numbers, distributed.ReduceOp.MAX)
    most, least, most_empty = numbers.abs().tolist()
    if most_empty:
        raise stop(
            "PL469",
            f"up to {most_empty} batches of a rank have no rows in this step; "
            f"rank {distributed.get_rank()} passes {empty}",
            *script_line("the batches arrive here"),
            help="give each batch at least one row, whose labels are all ignored if it must not "
            "count; or leave the batch out on all ranks",
        )
    if most != least:
        raise stop(
            "PL469",
            f"the ranks pass {least} to {most} batches in one step; "
            f"rank {distributed.get_rank()} passes {len(batches)}{of}",
            *script_line("the batches arrive here"),
            help="give every rank equally many: a sampler with `drop_last=True`, or a last step "
            "that all ranks leave out; or the rows and passes of `run.accumulation`",
        )
    if not most:
        raise ValueError("a step has at least one batch, and at most as many as passes")


def _has_rows(batch: Batch) -> bool:
    """Whether a batch has tensors, of which one has elements."""
    tensors = [v for v in batch.values() if isinstance(v, Tensor) and v.dim()]
    return not tensors or any(tensor.numel() for tensor in tensors)


def _items(run: RunParts, batches: Sequence[Batch], rule: LabelRule) -> Tensor:
    """The valid labels of all data ranks over the number of ranks that gradients are averaged over,
    as `run.num_items_in_batch`.
    """
    counts = [rule.count(batch) for batch in batches]
    return gradients.num_items_in_batch(counts, run.data_mesh) / run.lowered.sequence_parts
