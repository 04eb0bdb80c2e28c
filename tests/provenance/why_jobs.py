"""What test_whyshards runs on every rank."""

import numerics
from torch import distributed

import planc
from planc.answers.target import model_of
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.provenance.query import why


def shapes(family, plan, overrides):
    """(name, what `why` says that a rank keeps, what it keeps, trainable twice), of each."""
    model = numerics.build(family)
    sink = Sink()
    compiled = compile_plan(
        model_of(model), plan, sink, world_size=distributed.get_world_size(), settings=overrides
    )
    planc.apply(model, plan, overrides=overrides, device_type="cpu")
    found = []
    for name, parameter in model.named_parameters():
        answer = why(name, compiled, sink)
        [one] = answer.parameters
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.append((name, one.shard, tuple(local.shape), one.at_rest, local.nbytes))
    return found
