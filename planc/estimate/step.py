"""Memory and time of a step together, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from planc.estimate.memory import RankMemory, memory, usable
from planc.estimate.profiles import Hardware, Stack
from planc.estimate.step_time import StepTime, step_time
from planc.estimate.workload import Group, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """
    Args:
        time: of a step.
        ranks: the memory of each pipeline rank.
        usable: bytes that the allocator can hand out on this hardware.
    """

    time: StepTime
    ranks: tuple[RankMemory, ...]
    usable: float

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        return self.fullest.peak <= self.usable


def peak(work: Workload, hardware: Hardware, stack: Stack) -> float:
    """Bytes that a rank holds at most; cheaper than an estimate where time has no part in it."""
    if stack.stall_us:
        return estimate(work, hardware, stack).fullest.peak
    return max(rank.peak for rank in memory(work, stack, 0))


def estimate(work: Workload, hardware: Hardware, stack: Stack) -> Estimate:
    """The estimate of a step's memory and time."""
    time = step_time(work, hardware, stack)
    return Estimate(
        time=time,
        ranks=tuple(memory(work, stack, _ahead(work, time, hardware, stack))),
        usable=usable(hardware, stack),
    )


def _ahead(work: Workload, time: StepTime, hardware: Hardware, stack: Stack) -> int:
    """See `memory`: two where the host sets a pipeline's pace or a tensor group crosses nodes; all
    where it spans more than two, and the network alone sets the pace.
    """

    def nodes(group: Group) -> float:
        return group.size / group.in_node(hardware.ranks_per_node)

    if not stack.stall_us or nodes(work.pipeline) == 1:
        return 0
    if nodes(work.tensor) > 2:
        return work.micro_batches
    waits = nodes(work.tensor) > 1 or time.spent.launch > 0.15 * time.seconds
    return 2 if waits else 0
