"""What a loss keeps and moves beside what its modules do, with whole logits and in chunks."""

from __future__ import annotations

from planc.plan.ir import LossRule, Plan


def copies(plan: Plan, logits: int, width: int, transient: float) -> float:
    """Bytes of logits beside what is kept for backward; `width` of an activation's element,
    `transient` copies of whole logits.

    A loss in chunks has those of two chunks in the compute dtype and in float32, and sums the
    gradients of the head's weight and input in float32, which it casts at the end beside the
    last chunk's (`planc.runtime.standalone.loss`; measured on an H100 within 2 %).
    """
    if not plan.loss:
        return logits * transient
    rule, weight = _head(plan)
    vocabulary, features = rule.modules.module.parameters[0].shape
    chunk = logits / rule.op.chunks * weight / (vocabulary * features)
    trained = weight * rule.modules.module.parameters[0].trainable
    gradients = trained + logits / vocabulary * features
    last = width * gradients + (4 + width) * chunk
    return 4 * gradients + max((12 if rule.op.chunks > 1 else 8) * chunk, last)


def _head(plan: Plan) -> tuple[LossRule, float]:
    """The rule of the loss in chunks, and the elements of its head's weight on one rank."""
    rule = plan.loss[0]
    ranks = plan.mesh.size(rule.axis) if rule.axis else 1
    vocabulary, features = rule.modules.module.parameters[0].shape
    return rule, -(-vocabulary // ranks) * features


def chunk_passes(plan: Plan) -> float:
    """A third of the bytes that a loss in chunks moves for the gradient of the head's weight:
    backward counts the other two. Each chunk writes, reads and adds a gradient; it is zeroed
    before, and cast and scaled after.
    """
    if not plan.loss:
        return 0.0
    rule, weight = _head(plan)
    return (12 * rule.op.chunks + 14) * weight / 3
