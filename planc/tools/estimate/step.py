"""Memory and time of a step together, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from planc.tools.estimate.memory import RankMemory, memory, usable
from planc.tools.estimate.profiles import Hardware, Stack
from planc.tools.estimate.step_time import StepTime, step_time
from planc.tools.estimate.workload import Workload


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


def peak(work: Workload, stack: Stack) -> float:
    """Bytes that a rank holds at most."""
    return max(rank.peak for rank in memory(work, stack))


def estimate(work: Workload, hardware: Hardware, stack: Stack) -> Estimate:
    """The estimate of a step's memory and time."""
    return Estimate(
        time=step_time(work, hardware, stack),
        ranks=tuple(memory(work, stack)),
        usable=usable(hardware, stack),
    )
