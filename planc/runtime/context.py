"""A rank's part of a batch, for training scripts."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from planc.diagnostics.diagnostic import one_of
from planc.runtime.counted_labels import NEXT_LABELS, rule_of
from planc.runtime.preconditions import stop
from planc.runtime.safeguards.inputs import SameRows, leaves_of
from planc.runtime.safeguards.leaking_rows import refuse
from planc.runtime.safeguards.loss_rows import note_next_labels
from planc.runtime.script_line import script_line
from planc.runtime.standalone.context import CONTEXT
from planc.runtime.standalone.context_tokens import ContextError

_OF_KERNELS = ("cu_seq", "max_length_", "seq_idx")
"""The first characters of arguments that tell kernels where the documents of a batch begin."""


def rank_part(model: nn.Module, batch: Mapping[str, Any], same: SameRows | None) -> dict[str, Any]:
    """This rank's part of a batch, as of `Run.batch`."""
    if same is not None:
        same.before(leaves_of((), batch))
    context = model.__dict__.get(CONTEXT)
    if context is None:
        return dict(batch)
    if same is not None:
        refuse(model, batch)
    try:
        part: dict[str, Any] = context.batch(batch)
        note_next_labels(part, _next_labels(model, batch, part))
    except ContextError as error:
        raise stop(
            "PL544",
            f"the batch cannot be split over the context axis: {error}",
            *script_line("the batch arrives here"),
            help=_advice(batch),
        ) from error
    return part


def _next_labels(
    model: nn.Module, batch: Mapping[str, Any], part: Mapping[str, Any]
) -> Tensor | None:
    """The label of the token after each one of a rank's part, in the whole sequence; the next ids
    if the batch has no labels. None if the model predicts no next tokens.

    Args:
        batch: of all ranks.
        part: of it, as of `rank_part`.
    """
    if not rule_of(model).shifted:
        return None
    ids = batch.get("input_ids")
    if part.get(NEXT_LABELS) is not None or ids is None:
        return part.get(NEXT_LABELS)
    labels: Tensor = model.__dict__[CONTEXT].batch({**batch, "labels": ids})[NEXT_LABELS]
    return labels


def _advice(batch: Mapping[str, Any]) -> str:
    """The help of a batch that cannot be split."""
    starts = [n for n, value in batch.items() if n.startswith(_OF_KERNELS) and value is not None]
    if starts:
        names = one_of((f"`{n}`" for n in starts), last="and")
        return f"leave out {names}: `position_ids` that begin at 0 in each document separate them"
    return "pad or pack rows to a length that divides; `balance = none` needs no factor 2"
