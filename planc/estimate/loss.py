"""What a loss keeps and moves beside what its modules do, with whole logits and in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planc.plan.ir import LossRule

if TYPE_CHECKING:
    from planc.estimate.from_plan import PlanWork


def copies(work: PlanWork, logits: int) -> float:
    """Bytes of logits beside what is kept for backward.

    A loss in chunks has those of two chunks in the compute dtype and in float32, and sums the
    gradients of the head's weight and input in float32, which it casts at the end beside the
    last chunk's (`planc.runtime.standalone.loss`; measured on an H100 within 2 %).
    """
    if not work.plan.loss:
        return logits * work.stack.loss_transient
    rule, weight = _head(work)
    vocabulary, features = rule.modules.module.parameters[0].shape
    chunk = logits / rule.op.chunks * weight / (vocabulary * features)
    trained = weight * rule.modules.module.parameters[0].trainable
    gradients = trained + logits / vocabulary * features
    last = work.width * gradients + (4 + work.width) * chunk
    return 4 * gradients + max((12 if rule.op.chunks > 1 else 8) * chunk, last)


def _head(work: PlanWork) -> tuple[LossRule, float]:
    """The rule of the loss in chunks, and the elements of its head's weight on one rank."""
    rule = work.plan.loss[0]
    ranks = work.plan.mesh.size(rule.axis) if rule.axis else 1
    vocabulary, features = rule.modules.module.parameters[0].shape
    return rule, -(-vocabulary // ranks) * features


def chunk_passes(work: PlanWork) -> float:
    """A third of the bytes that a loss in chunks moves for the gradient of the head's weight:
    backward counts the other two. Each chunk writes, reads and adds a gradient; it is zeroed
    before, and cast and scaled after.
    """
    if not work.plan.loss:
        return 0.0
    rule, weight = _head(work)
    return (12 * rule.op.chunks + 14) * weight / 3
