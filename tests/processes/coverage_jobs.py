"""What every rank does for a row of docs/coverage.md."""

import torch
from torch import distributed

from planc.diagnostic import Sink
from planc.model.small.transformers_model import TransformersBuilder
from planc.ops.document import digest, loads
from planc.trial import program


def prove(values, document, seed=0):
    """The errors of a lowered plan beside one process: logits, loss, the worst gradient, and the
    worst parameter after two steps of AdamW.

    Args:
        values: the small model's configuration.
        document: the lowered plan.
    """
    torch.manual_seed(0)
    lowered = loads(document, "coverage", Sink())
    found = program.prove(
        TransformersBuilder(values), lowered, digest(lowered), seed, lambda _: None
    )
    distributed.barrier()
    worst = max(found.gradients, key=found.gradients.get)
    return {
        "logits": found.logits,
        "loss": found.loss,
        "gradient": found.gradients[worst],
        "worst": worst,
        "parameters": max(found.parameters.values()),
    }
