"""The speed of a plan's blocks in stages, for each way to cut them.

The time of a block is the one of `planc estimate`, for a microbatch that the plan states. All
machines must cut alike, so the profiles are always `h100-8x` and `torch`; what decides is how the
times of blocks compare with each other, and with those of the embedding and of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from planc.diagnostics.diagnostic import Sink
from planc.elaborate.sections.stage_sizes import balance_stages, even
from planc.ir.nodes import PipelineRule, Plan
from planc.ir.shared_parameters import cut_at
from planc.lowering.schedules import simulate_schedule
from planc.model.facts import Facts
from planc.model.layer_kinds import length
from planc.ops.base import AxisRole
from planc.tools.estimate import profiles
from planc.tools.estimate.counted import Counted
from planc.tools.estimate.from_plan import Batch, PlanWork
from planc.tools.estimate.profiles import Hardware, Stack
from planc.tools.estimate.step_time import Passes, step_time
from planc.tools.estimate.workload import Layer

Bounds = tuple[int, ...]
Layers = tuple[tuple[Layer, int], ...]


@dataclass
class Cuts:
    """The ways to cut the blocks of a plan into its number of stages.

    Args:
        work: of the plan with its adapters, for the batch that it states.
        rule: of the pipeline.
    """

    work: PlanWork
    rule: PipelineRule
    hardware: Hardware
    stack: Stack

    def best(self, counted: Counted) -> tuple[Bounds, tuple[float, ...]]:
        """The fastest cut that is found, and the seconds of its stages for a microbatch: never
        slower than as many blocks in each stage, or as much work.
        """
        op, step = self.rule.op, self.work.workload(counted)
        blocks = self._blocks(counted)
        passes = Passes(step, self.hardware, self.stack)
        forward = [sum(passes.forward(x).total * n for x, n in own) for own in blocks]
        backward = [sum(passes.backward(x).total * n for x, n in own) for own in blocks]

        def run(bounds: Bounds) -> float:
            stages = tuple((*chain(*blocks[a:b]),) for a, b in pairwise(bounds))
            return step_time(replace(step, stages=stages), self.hardware, self.stack).seconds

        def schedule_seconds(bounds: Bounds) -> float:
            return simulate_schedule(
                op.schedule,
                ranks=step.pipeline.size,
                chunks=step.chunks,
                micro_batches=op.microbatches,
                forward=[sum(forward[a:b]) for a, b in pairwise(bounds)],
                backward=[sum(backward[a:b]) for a, b in pairwise(bounds)],
                rows=op.rank_passes,
            ).seconds

        both = [one + two for one, two in zip(forward, backward, strict=True)]
        alike = _bounds(balance_stages([round(1e9 * s) for s in both], 0, 0, op.stages))
        others = op.bounds, _bounds(even(len(blocks), op.stages, 0, 0))
        start = min((alike, *others), key=schedule_seconds)
        found = min((_move_blocks(start, schedule_seconds), alike, *others), key=run)
        return found, tuple(sum(both[a:b]) for a, b in pairwise(found))

    def _blocks(self, counted: Counted) -> list[Layers]:
        """The layers of each block, with what is around all at both ends: those of as many stages
        as there are blocks.
        """
        op, facts = self.rule.op, self.work.facts
        single = replace(op, schedule="gpipe", rank_passes=())
        rule = replace(self.rule, op=cut_at(single, (*range(length(op.blocks) + 1),), facts))
        plan = replace(self.work.plan, pipeline=rule)
        return [*PlanWork(plan, facts, self.work.batch, self.stack).stages(counted)]


def _bounds(sizes: Sequence[int]) -> Bounds:
    return (0, *accumulate(sizes))


def _move_blocks(bounds: Bounds, seconds: Callable[[Bounds], float]) -> Bounds:
    """A cut after all moves of one block to the next stage, or back, that save time."""
    best = seconds(bounds)
    moved = True
    while moved:
        moved = False
        for other in _near(bounds):
            if (took := seconds(other)) < best * (1 - 1e-9):
                bounds, best, moved = other, took, True
                break
    return bounds


def _near(bounds: Bounds) -> Iterator[Bounds]:
    """The cuts that differ by one block of one stage."""
    for i in range(1, len(bounds) - 1):
        for by in (-1, 1):
            if bounds[i - 1] < bounds[i] + by < bounds[i + 1]:
                yield (*bounds[:i], bounds[i] + by, *bounds[i + 1 :])


def cuts_of(plan: Plan, facts: Facts, rule: PipelineRule) -> Cuts:
    """The ways to cut a plan with its adapters, for the microbatch that it states."""
    hardware, stack = profiles.hardware("h100-8x", Sink()), profiles.stack("torch", Sink())
    assert rule.times and hardware and stack
    ranks = plan.mesh.ranks_of(AxisRole.DATA)
    rows = rule.times.rows * ranks * rule.op.microbatches
    batch = Batch(global_batch=rows, sequence=rule.times.seq)
    return Cuts(PlanWork(plan, facts, batch, stack), rule, hardware, stack)
