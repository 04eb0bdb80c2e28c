"""The part of a lowered plan that a simulation runs; imports no torch."""

from __future__ import annotations

from dataclasses import replace

from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.configure import Configure
from planc.ops.freeze import Freeze
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered, Stage
from planc.ops.tensor_parallel import Parallelize, Tie

SIMULATED = (Configure, Adapt, Parallelize, Tie, Freeze, Checkpoint)
"""The kinds of operation that a simulation runs: those that decide what a step computes in
float32 over tensor axes. It leaves out how weights arrive, 4-bit weights, compile, FSDP with all
that is set on its units, and random states."""


def tensor_part(lowered: Lowered) -> Lowered:
    """The operations that a simulation runs, without what else it does not look at.

    So two plans with the same tensor part have the same outcome, which is kept by its digest.
    """
    stages = tuple(
        Stage(ops=tuple(op for op in stage.ops if isinstance(op, SIMULATED)))
        for stage in lowered.stages
    )
    return replace(lowered, plan="", data=(), stages=stages)
