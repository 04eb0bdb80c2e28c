"""PL160: a split output that no one takes, or a split input that no one gives."""

from __future__ import annotations

from planc.checks.table import active, around, splits_output, takes_split
from planc.diagnostic import Sink
from planc.ir.plan import Plan
from planc.model.facts import Facts


def pairs(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Inside one module, what colwise splits by features a rowwise layer puts together again.

    A warning and not an error: a module's own code may do it in a way that can't be seen here.
    """
    if "tensor" in plan.broken:
        return
    for parent, own in around(facts, active(plan)):
        given = [r for r in own if splits_output(r) and r.modules.module.kind == "linear"]
        taken = [r for r in own if takes_split(r) and r.modules.module.kind == "linear"]
        if given and not taken:
            sink.warning(
                "PL160",
                f"no rowwise layer of `{parent}` takes the split output of "
                f"`{given[0].modules.path[-1]}`",
                *dict.fromkeys(r.origin for r in given),
                facts=["every rank goes on with a part of the features"],
                help="put `rowwise` on the projection that follows, or gather: "
                "`colwise(-> replicate)`",
            )
        if taken and not given:
            sink.warning(
                "PL160",
                f"no colwise layer of `{parent}` gives `{taken[0].modules.path[-1]}` the split "
                "input that it takes",
                *dict.fromkeys(r.origin for r in taken),
                facts=["every rank takes its whole input for a part of the features"],
                help="put `colwise` on the projections before it, or state a whole input: "
                "`rowwise(replicate -> replicate)`",
            )
