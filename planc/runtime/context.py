"""A rank's part of a batch, for training scripts."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from planc.diagnostics.diagnostic import one_of
from planc.runtime.preconditions import stop
from planc.runtime.safeguards.inputs import SameRows, leaves_of
from planc.runtime.safeguards.leaking_rows import refuse
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
    except ContextError as error:
        raise stop(
            "PL544",
            f"the batch cannot be split over the context axis: {error}",
            *script_line("the batch arrives here"),
            help=_advice(batch),
        ) from error
    return part


def _advice(batch: Mapping[str, Any]) -> str:
    """The help of a batch that cannot be split."""
    starts = [n for n, value in batch.items() if n.startswith(_OF_KERNELS) and value is not None]
    if starts:
        names = one_of((f"`{n}`" for n in starts), last="and")
        return f"leave out {names}: `position_ids` that begin at 0 in each document separate them"
    return "pad or pack rows to a length that divides; `balance = none` needs no factor 2"
