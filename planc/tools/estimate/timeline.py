"""An estimate as parts that a picture can draw: of memory, of a step, and of what groups send."""

from __future__ import annotations

from dataclasses import replace

from planc.lowering.collectives import step_collectives
from planc.lowering.step import REDUCE, SEND, Step
from planc.tools.estimate.answer import Answer
from planc.tools.estimate.step_time import Passes

Bars = dict[str, list[tuple[str, float, str, str]]]
"""By title, the parts: a name, bytes or seconds, how these come about, a line of the plan."""


def moments(found: Answer) -> Bars:
    """The memory of a rank at the candidates for its peak; without a batch, between two steps."""
    ranks = found.estimate.ranks
    return {
        (f"stage {rank.rank}: " if len(ranks) > 1 else "") + moment.name: [
            (i.name, i.size, i.how, i.origin.place if i.origin else "") for i in moment.items
        ]
        for rank in ranks
        for moment in (rank.moments if found.counted else rank.moments[-1:])
    }


def passes(found: Answer) -> Bars:
    """The work of the first rank of a pipeline for one micro-batch, and once in a step, in
    order.
    """
    work, time = found.work, found.estimate.time
    made = Passes(work, found.hardware, found.stack)
    layers = [pair for stage in work.of_rank(0) for pair in work.stages[stage]]
    bars: Bars = {}
    for name, way, order in (
        ("forward", made.forward, layers),
        ("backward", made.backward, layers[::-1]),
    ):
        bars[f"{name} of a micro-batch, x {work.micro_batches * work.runs}"] = [
            (kind.replace("_", " "), seconds * n, f"{n} x {layer.name}", "")
            for layer, n in order
            for kind, seconds in way(layer)._asdict().items()
            if seconds
        ]
    passed = sum(part[1] for bar in bars.values() for part in bar)
    passed *= work.micro_batches * work.runs
    last = time.spent.optimizer
    waits = max(0.0, time.seconds - passed - last)
    ends = (("optimizer", last, "once", ""), ("waiting", waits, "pipeline, collectives", ""))
    return {**bars, "end of a step": [part for part in ends if part[1] > 1e-6]}


def bytes_sent(step: Step) -> dict[str, float]:
    """The communication volume of a step in bytes, on the pipeline rank that sends most, by the
    names of the axes of its process groups, joined with ` x `.

    In a ring each rank but one passes a part on; an all-reduce does it twice (Patarasuk and Yuan,
    2009). Unknown sizes (`planc.lowering.collectives.left_out`) are not included.
    """
    lowered, most = step.lowered, dict[str, float]()
    for stage in lowered.stages:
        found: dict[str, float] = {}
        for one in step_collectives(replace(step, lowered=replace(lowered, stages=(stage,)))):
            ranks, name = one.ranks(lowered), " x ".join(one.axes)
            share = 1 if one.kind == SEND else (ranks - 1) / ranks * (1 + (one.kind == REDUCE))
            found[name] = found.get(name, 0.0) + share * one.times * (one.size or 0)
        most = max(most, found, key=lambda sent: sum(sent.values()))
    return most
