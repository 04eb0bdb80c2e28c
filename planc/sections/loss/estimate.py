"""Memory and time of a loss in chunks."""

from planc.ir.nodes import Plan
from planc.sections.loss.ops import ChunkLoss


def logit_copies(plan: Plan, logits: int, width: int) -> float:
    """The logits of two chunks in the compute dtype and in float32, and the gradients of the head's
    weight and input in float32, which are cast at the end beside the last chunk's
    (`planc.runtime.standalone.loss`; measured on an H100 within 2 %).

    Args:
        logits: their number on a rank.
        width: bytes of an activation's element.
    """
    rule, weight = _head(plan)
    vocabulary, features = rule.modules.module.parameters[0].shape
    chunk = logits / rule.chunks * weight / (vocabulary * features)
    trained = weight * rule.modules.module.parameters[0].trainable
    gradients = trained + logits / vocabulary * features
    last = width * gradients + (4 + width) * chunk
    return 4 * gradients + max((12 if rule.chunks > 1 else 8) * chunk, last)


def gradient_passes(plan: Plan) -> float:
    """A third of the bytes that a loss in chunks moves for the gradient of the head's weight:
    backward counts the other two. Each chunk adds a gradient; it is zeroed before, and cast and
    scaled after.
    """
    rule, weight = _head(plan)
    return (_ADDED * rule.chunks + 14) * weight / 3


_ADDED = 15
"""Bytes for each element of a gradient in 16 bits that is added to one in float32: it reads 6 and
writes 4, at two thirds of the bandwidth (measured on an H100, as of a cast to float32)."""


def _head(plan: Plan) -> tuple[ChunkLoss, float]:
    """The rule, and the elements of its head's weight on one rank."""
    rule: ChunkLoss = plan.sections["loss"][0]
    vocabulary, features = rule.modules.module.parameters[0].shape
    return rule, -(-vocabulary // plan.mesh.size(*rule.axes)) * features
