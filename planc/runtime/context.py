"""A rank's part of a batch, for training scripts."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from planc.ops.context import ContextParallel
from planc.ops.lowered import Lowered
from planc.runtime.meshes import Meshes
from planc.runtime.packed_documents import refuse
from planc.runtime.preconditions import stop
from planc.runtime.same_inputs import FirstPasses
from planc.runtime.script_line import script_line
from planc.runtime.standalone.context import CONTEXT
from planc.runtime.standalone.context_tokens import ContextError


def sequence_parts(lowered: Lowered) -> int:
    """The number of ranks that planc splits a sequence over."""
    ops = [op for op in lowered.ops if isinstance(op, ContextParallel)]
    return lowered.axis_size(*(op.axis for op in ops))


def same_batches(lowered: Lowered, meshes: Meshes, passes: int) -> FirstPasses:
    """Compares the first batches over the ranks that share sequences."""
    axes = [op.axis for op in lowered.ops if isinstance(op, ContextParallel)]
    return FirstPasses(passes, meshes.part(*axes) if axes and passes else None, splits="sequences")


def rank_part(model: nn.Module, batch: Mapping[str, Any], first: FirstPasses) -> dict[str, Any]:
    """This rank's part of a batch, as of `Run.batch`."""
    context = model.__dict__.get(CONTEXT)
    if context is None:
        return dict(batch)
    if not first.done:
        first.before((), dict(batch))
    if first.passes:
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
