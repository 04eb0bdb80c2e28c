"""What every rank does for a row of docs/generated/coverage.md."""

import torch
from torch import distributed

from planc.diagnostics.diagnostic import Sink
from planc.ops.document import digest, loads
from planc.proxy.transformers_model import TransformersBuilder
from planc.simulate import prove as trial
from planc.simulate.batches import batches
from planc.simulate.numerics import InFloat64


def prove(values, document, seed=0, wide=False):
    """The errors of a lowered plan beside one process: logits, loss, the worst gradient, the clip
    norm, and the worst parameter after two steps of AdamW; and what the inputs had.

    Args:
        values: the small model's configuration.
        document: the lowered plan.
        wide: in float64, which tells a fault from the rounding of a model that amplifies it.
    """
    torch.manual_seed(0)
    lowered = loads(document, "coverage", Sink())
    builder = TransformersBuilder(values)
    builder = InFloat64(builder) if wide else builder
    found = trial.prove(builder, lowered, digest(lowered), seed, lambda _: None)
    distributed.barrier()
    worst = max(found.gradients, key=found.gradients.get)
    return {
        "logits": found.logits,
        "loss": found.loss,
        "norm": found.norm,
        "gradient": found.gradients[worst],
        "worst": worst,
        "parameters": max(found.parameters.values()),
        **inputs(batches(builder, lowered, seed)),
    }


def inputs(data):
    """Whether a run had padding, and labels that are ignored unevenly over the data ranks."""
    first = data.steps[0][0]
    return {"padding": first.name == "padding", "uneven": data.counted}
