"""The loss of a single process with the terms that a plan's loss section adds."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from planc.ops.loss import ChunkLoss
from planc.runtime.standalone.loss import IGNORED


def with_terms(model: nn.Module, op: ChunkLoss) -> None:
    """Gives a plain model the loss that the plan asks for; its own, where nothing is added."""
    if op.label_smoothing or op.z_loss:
        model.loss_function = partial(_loss, op.label_smoothing, op.z_loss)


def _loss(  # noqa: PLR0917, as transformers calls it
    smoothing: float,
    z_loss: float,
    logits: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | None = None,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=IGNORED)[..., 1:]
    logits, wanted = logits.float().flatten(0, -2), shift_labels.reshape(-1)
    counted = wanted != IGNORED
    losses = cross_entropy(logits, wanted, label_smoothing=smoothing, reduction="none")
    losses = losses + z_loss * torch.logsumexp(logits, -1).square() * counted
    items = counted.sum() if num_items_in_batch is None else num_items_in_batch
    return losses.sum() / items
