"""An estimate as parts that a picture can draw: of memory, of a step, and of what groups send."""

from __future__ import annotations

from dataclasses import asdict, replace

from planc.estimate.answer import Answer
from planc.estimate.step_time import Passes, bytes_sent
from planc.estimate.workload import Collective, Group, Workload

Bars = dict[str, list[tuple[str, float, str, str]]]
"""By title, the parts: a name, bytes or seconds, how these come about, a line of the plan."""


def moments(found: Answer) -> Bars:
    """What a rank holds when it may hold most; without a batch, between two steps."""
    ranks = found.estimate.ranks
    return {
        (f"stage {rank.rank}: " if len(ranks) > 1 else "") + moment.name: [
            (i.name, i.size, i.how, i.origin.place if i.origin else "") for i in moment.items
        ]
        for rank in ranks
        for moment in (rank.moments if found.counted else rank.moments[-1:])
    }


def passes(found: Answer) -> Bars:
    """What the first rank of a pipeline does for one micro-batch, and once in a step, in order."""
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
            for kind, seconds in asdict(way(layer)).items()
            if seconds
        ]
    passed = sum(part[1] for bar in bars.values() for part in bar)
    passed *= work.micro_batches * work.runs
    last = time.spent.optimizer
    waits = max(0.0, time.seconds - passed - last)
    ends = (("optimizer", last, "once", ""), ("waiting", waits, "pipeline, collectives", ""))
    return {**bars, "end of a step": [part for part in ends if part[1] > 1e-6]}


def sent_by_group(found: Answer) -> dict[str, float]:
    """Bytes that a rank sends in a step, by the name of the group that it sends them to."""
    work, sent = found.work, {}
    inside = (c for s in work.stages for x, _ in s for c in (*x.forward, *x.backward))
    left = bytes_sent(work, found.hardware, found.stack)
    for group in dict.fromkeys((work.replicate, work.data, *(c.group for c in inside))):
        work = _without(
            work, group
        )  # replicas send shards, whose size `data` decides: they go first
        before, left = left, bytes_sent(work, found.hardware, found.stack)
        sent[group.name] = before - left
    return sent


def _without(work: Workload, group: Group) -> Workload:
    """The same work, in which a group sends nothing."""

    def rest(sent: tuple[Collective, ...]) -> tuple[Collective, ...]:
        return tuple(c for c in sent if c.group != group)

    stages = tuple(
        tuple((replace(x, forward=rest(x.forward), backward=rest(x.backward)), n) for x, n in stage)
        for stage in work.stages
    )
    data, replicas = (replace(g, size=1) if g == group else g for g in (work.data, work.replicate))
    return replace(work, stages=stages, data=data, replicate=replicas)
