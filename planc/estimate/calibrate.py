"""Fits constants of a hardware profile to a user's own measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

from planc.estimate.profiles import Hardware, Stack
from planc.estimate.step_time import step_time
from planc.estimate.workload import Workload

CONSTANTS = ("matmul_tflops", "memory_gb_s", "launch_us", "node_latency_us", "node_reduce_gb_s")
"""What differs most between machines that share a name: clocks, power, memory, CPU, links."""


def calibrated(
    hardware: Hardware, stack: Stack, measured: Sequence[tuple[Workload, float]]
) -> Hardware:
    """The profile whose step times are nearest to measured ones.

    Each constant in turn is raised and lowered by a step that shrinks. Nearest is by the mean of
    the absolute logarithm of the ratio, where a ratio beyond 1.65 counts as that: an outlier
    says little.

    Args:
        measured: workloads with the seconds of a step.
    """

    def error(profile: Hardware) -> float:
        ratios = (log(s / step_time(w, profile, stack).seconds) for w, s in measured)
        return sum(min(abs(r), 0.5) for r in ratios) / len(measured)

    best, step = error(hardware), 0.3
    while step > 0.02:
        better = False
        for name in CONSTANTS:
            for factor in (1 + step, 1 / (1 + step)):
                other = replace(hardware, **{name: getattr(hardware, name) * factor})
                if (found := error(other)) < best - 1e-6:
                    best, hardware, better = found, other, True
        step = step if better else step / 2
    return hardware
