"""A rank's part of a batch, for training scripts."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from planc.runtime.preconditions import stop
from planc.runtime.safeguards.inputs import SameRows, leaves_of
from planc.runtime.safeguards.leaking_rows import refuse
from planc.runtime.script_line import script_line
from planc.runtime.standalone.context import CONTEXT
from planc.runtime.standalone.context_tokens import ContextError


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
            help="pad or pack rows to a length that divides; `balance = none` needs no factor 2",
        ) from error
    return part
