"""Models whose loss a plan replaces, and the same loss in one process."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from planc.diagnostics.diagnostic import Diagnostic
from planc.model.own_code import replaced_loss
from planc.ops.lowered import Lowered
from planc.ops.registry import AnyOp
from planc.runtime.preconditions import problem
from planc.runtime.standalone.loss import IGNORED
from planc.sections.loss.ops import ChunkLoss


def model_problems(model: nn.Module, lowered: Lowered) -> Iterator[Diagnostic]:
    """PL557: the plan would replace another loss than the cross entropy of the next tokens."""
    for chunked in lowered.find_ops(ChunkLoss):
        if name := replaced_loss(model):
            yield problem(
                "PL557",
                f"the loss of this model is `{name}`, and the plan would compute the cross entropy "
                f"of the next tokens in its place ({chunked.place})",
                help="remove the loss section (`loss_chunks = 0` in a shipped plan); its "
                "`label_smoothing` and `z_loss` are what it can add",
            )
            return


def change_reference(model: nn.Module, op: AnyOp) -> None:
    """Gives a model of one process the terms that the plan adds to its loss."""
    if isinstance(op, ChunkLoss) and (op.label_smoothing or op.z_loss):
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
