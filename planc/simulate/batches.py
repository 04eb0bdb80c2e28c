"""The batches of a simulation, which show errors that small batches usually hide.

The first step has two passes, accumulated: one with padding on the left of a row, rows that repeat
one token (so that some experts get none), and labels that are ignored unevenly over the data
ranks; one with two packed documents in each row. The second step has one plain pass, if asked of a
length that the tensor axes don't divide. A model that
does not take such an input in a single process gets the pass without it. A loss that is a mean over
labels has as many in each row, all of them late, and so unlike numbers in sequence shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.proxy.input_search import BatchShape, forward_arguments, rank_slice
from planc.proxy.refused_inputs import refuses_inputs
from planc.proxy.sample_inputs import Inputs
from planc.proxy.user_model import ModelBuilder, UserModelBuilder
from planc.runtime.standalone.documents import RESETS, reset_states
from planc.runtime.standalone.images import Tokens, placeholders, rows_of_images
from planc.runtime.standalone.loss import IGNORED
from planc.simulate.numerics import for_trial, trial_dtype
from planc.simulate.trial_part import separate_ops

LENGTH = 16
"""The least tokens per row; divisible for sequence axes of up to 16 ranks."""
PADS = 2
"""Padding tokens of a row, on the left; towers' placeholder tokens begin after them."""
IMAGES = (1, 2, 0, 0, 1, 0, 2)
"""The images of rows, again and again: of two data ranks with two rows each, one has none."""
COUNT = "num_items_in_batch"
"""The argument by which transformers' models divide the sum of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPass:
    """A forward and backward pass over all data ranks' rows; its name says what it shows.

    `tokens`: those that images take the place of, as of `placeholders`.
    """

    name: str = ""
    inputs: Inputs
    tokens: Tokens = field(default_factory=dict)

    def of_rank(self, rank: int, ranks: int) -> Inputs:
        """The rows that one data rank reads, with their images."""
        own = rows_of_images(self.inputs, ranks, self.tokens)[rank]
        rest = {name: value for name, value in self.inputs.items() if name not in own}
        images = {name: value for name, value in own.items() if value is not None}
        return {**rank_slice(rest, rank, ranks), **images}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The passes of each step, over the rows of so many data ranks.

    `counted`: the model divides its loss by a given number of tokens. `gradients_alone`: no steps.
    """

    steps: tuple[tuple[TrialPass, ...], ...]
    counted: bool
    ranks: int
    gradients_alone: bool = False

    def to_device(self, device: str) -> Batches:
        """Copies the batches to a device."""
        steps = (
            tuple(
                replace(one, inputs={n: v.to(device) for n, v in one.inputs.items()})
                for one in step
            )
            for step in self.steps
        )
        return replace(self, steps=tuple(steps))

    def valid(self, step: int) -> int:
        """The number of valid labels of a step, over all passes and data ranks."""
        return sum(valid_labels(p.inputs["labels"]) for p in self.steps[step])

    def extra(self, step: int) -> dict[str, Any]:
        """The arguments that normalize the loss of each data rank, if the model takes them."""
        return {COUNT: self.valid(step) / self.ranks} if self.counted else {}

    def weight(self, step: int) -> float:
        """The factor of a pass's loss: means of equally many tokens are averaged."""
        return 1.0 if self.counted else 1 / len(self.steps[step])


def valid_labels(labels: torch.Tensor) -> int:
    """The labels that count; a causal model predicts none for the first token."""
    return int((labels[..., 1:] != IGNORED).sum())


def batches(
    builder: ModelBuilder, lowered: Lowered, seed: int, *, quick: bool = False, uneven: bool = False
) -> Batches:
    """The batches for one seed of weights and tokens; `quick` is one padded pass, `uneven` gives
    the last pass another length, if there is one.
    """
    ranks = lowered.axis_size(*lowered.data)
    parts = lowered.pipeline.microbatches if lowered.pipeline else 1
    rows = ranks * math.lcm(max(1, 4 // ranks), parts)
    multiples = (op.token_multiple for op in lowered.ops)
    length = math.lcm(LENGTH, lowered.world_size, *multiples)

    def plain(number: int, length: int = length, images: tuple[int, ...] = ()) -> Inputs:
        # ids at the ends of the vocabulary are often special tokens
        numbers = 1000 * (number + 1) + seed
        shape = BatchShape(rows=rows, length=length, seed=numbers, ends=8, images=images)
        made = builder.sample(shape).items()
        return {n: v.to(dtype) if v.is_floating_point() else v for n, v in made}

    model = for_trial(builder.build(seed), lowered)
    dtype, alone = trial_dtype(lowered), bool(separate_ops(lowered))
    reset_states(model, *lowered.state_updates)
    counted = _counts(model, plain(0))
    config = getattr(model, "config", None)
    tokens = placeholders(config) if ranks == 1 or lowered.shared_encoders else {}

    def batch_with_labels(number: int, length: int = length) -> Inputs:
        made = plain(number, length)
        if tokens and _runs(model, uneven := plain(number, length, IMAGES)):
            made = uneven
        return made if counted else _late(made)

    most = _padded_rows(builder, rows, ranks)
    padded = replace(_pad(model, batch_with_labels(0), ranks, most, uneven=counted), tokens=tokens)
    if quick:
        return Batches(steps=((padded,),), counted=counted, ranks=ranks, gradients_alone=True)
    # the number by which the length of a document must be divisible
    per_document = (op.axis for op in lowered.contexts if op.balance == "per_document")
    document = math.lcm(*(2 * lowered.axis_size(axis) for axis in per_document))
    last = batch_with_labels(2)
    if uneven and (other := _uneven_length(lowered, length)) and _text(last):
        last = shorter if _runs(model, shorter := batch_with_labels(2, other)) else last
    packed = replace(_pack(model, batch_with_labels(1), document), tokens=tokens)
    # after a step, more numbers fall to the other side of a border
    steps = ((padded, packed), *(() if alone else ((TrialPass(inputs=last, tokens=tokens),),)))
    return Batches(steps=steps, counted=counted, ranks=ranks, gradients_alone=alone)


def _uneven_length(lowered: Lowered, length: int) -> int | None:
    """The greatest length below one that gives the ranks of a tensor axis unlike numbers of tokens,
    and those of a context axis as many as they take; None without such axes.
    """
    sizes = [a.size for a in lowered.axes if a.role is AxisRole.TENSOR and a.size > 1]
    context = lowered.contexts
    parts = math.prod(lowered.axis_size(op.axis) for op in context)
    runs = parts * (2 if any(op.balance != "none" for op in context) else 1)
    found = (n for n in range(length - runs, 0, -runs) if any(n // parts % s for s in sizes))
    return next(found, None)


def _late(inputs: Inputs) -> Inputs:
    """The inputs without the first labels of each row."""
    if not _text(inputs) or "labels" not in inputs:
        return inputs
    labels = inputs["labels"].clone()
    labels[:, : labels.shape[1] // 4] = IGNORED
    return {**inputs, "labels": labels}


def _padded_rows(builder: ModelBuilder, rows: int, ranks: int) -> int:
    """The number of the first rows with padding: all of a data rank for a user's own code, which
    may take the length of its longest row.
    """
    own = isinstance(getattr(builder, "builder", builder), UserModelBuilder)
    return rows // ranks if own and ranks > 1 else 1


def _pad(model: nn.Module, inputs: Inputs, ranks: int, padded: int, *, uneven: bool) -> TrialPass:
    """The pass with padding in its first `padded` rows, if the model takes an attention mask."""
    if not _text(inputs):
        return TrialPass(inputs=inputs)
    made = dict(inputs)
    rows = len(made["input_ids"])
    if set(made) <= {"input_ids", "labels"}:
        made["input_ids"] = made["input_ids"].clone()
        last = rows - rows // ranks if ranks > 1 else rows // 2
        made["input_ids"][last:] = made["input_ids"][last:, :1]
    if uneven and "labels" in made:
        labels = made["labels"] = made["labels"].clone()
        labels[: max(1, rows // max(ranks, 2)), :-1] = IGNORED  # one label of a row is left
    if "attention_mask" not in made and "attention_mask" in forward_arguments(model):
        mask = torch.ones_like(made["input_ids"])
        mask[:padded, :PADS] = 0
        masked = {**made, "attention_mask": mask}
        if _runs(model, masked):
            return TrialPass(name="padding", inputs=masked)
    return TrialPass(inputs=made)


def _pack(model: nn.Module, inputs: Inputs, part: int) -> TrialPass:
    """Packs two documents into each row, of a multiple of `part` tokens, with the row's images in
    either. Positions restart at 0.
    """
    alone = set(inputs) <= {"input_ids", "labels"}
    if not _text(inputs) or not (alone or placeholders(getattr(model, "config", None))):
        return TrialPass(inputs=inputs)
    rows, length = inputs["input_ids"].shape
    first = (length // 2 - 1) // part * part
    positions = torch.cat([torch.arange(first), torch.arange(length - first)])
    packed = {**inputs, "position_ids": positions.expand(rows, -1).contiguous()}
    taken = "position_ids" in forward_arguments(model) or RESETS in model.__dict__
    if taken and _runs(model, packed):
        return TrialPass(name="two packed documents", inputs=packed)
    return TrialPass(inputs=inputs)


def _text(inputs: Inputs) -> bool:
    """Whether a batch has ids, [rows, length], and labels of that shape or none."""
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    return ids is not None and ids.dim() == 2 and (labels is None or ids.shape == labels.shape)


def _runs(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model takes these inputs in a single process, with a finite loss.

    Raises:
        Exception: the model raises one that says nothing of its inputs.
    """
    try:
        with torch.no_grad():
            return bool(torch.isfinite(model(**inputs).loss))
    except Exception as error:
        if not refuses_inputs(error):
            raise
        return False


def _counts(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model's loss depends on `num_items_in_batch`.

    Raises:
        Exception: the model raises one that says nothing of its inputs.
    """
    if not _text(inputs) or getattr(model, "accepts_loss_kwargs", None) is False:
        return False
    losses = []
    try:
        for count in (1.0, 2.0):
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                torch.random.default_generator.manual_seed(0)
                losses.append(float(model(**inputs, **{COUNT: count}).loss))
    except Exception as error:
        if not refuses_inputs(error):
            raise
        return False
    return losses[0] != losses[1]
