"""PL670 to PL672: random numbers in training, and who must draw the same ones."""

from __future__ import annotations

from planc.checks.queries import active, axis_label, ranks
from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.model.randomness import layer_drop_fields, random_fields
from planc.plan.ir import Plan


def randomness(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Ranks of a tensor axis share activations, and ranks of an FSDP axis share layers.

    Proofs leave all random operations out: one process cannot draw the numbers of four.
    """
    rules = active(plan) if "tensor" not in plan.broken else ()
    fields = random_fields(facts)
    if rules and fields:
        axis, count = rules[0].axis, ranks(plan, rules[0])
        sink.info(
            "PL670",
            f"training draws random numbers, which no proof compares: {', '.join(fields)}",
            axis_label(plan, rules[0]),
            facts=[
                f"`apply` gives the {count} ranks of {axis} one random state, so they draw the "
                "same numbers"
            ],
            help="set the seed before `apply`, or afterwards the same seed on all ranks of a "
            "tensor axis",
        )
    for checkpoint in plan.checkpoint if fields else ():
        if not checkpoint.preserve_rng:
            sink.warning(
                "PL672",
                f"the recomputation of `{checkpoint.modules}` draws other random numbers than its "
                f"forward pass: {', '.join(fields)}",
                checkpoint.origin,
                help="leave out `preserve_rng = false`, unless these modules draw none",
            )
    if skipped := layer_drop_fields(facts):
        shards = plan.fsdp is not None and plan.mesh.size(*plan.fsdp.shard) > 1
        if shards or rules:
            sink.warning(
                "PL671",
                f"training skips layers at random ({', '.join(skipped)}), and ranks that skip "
                "different layers deadlock",
                *([plan.fsdp.origin] if plan.fsdp else [rules[0].origin]),
                help="set it to 0 in the configuration, or use the same seed on all ranks",
            )
