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
"""The operations that decide what a step computes in float32 over tensor axes. Weight loading,
quantization, compile, FSDP with the settings of its units, and random states are left out."""


def tensor_part(lowered: Lowered) -> Lowered:
    """The lowered plan reduced to the operations that a simulation runs.

    Plans with the same tensor part have the same outcome, so outcomes are cached by its digest.
    """
    stages = tuple(
        Stage(ops=tuple(op for op in stage.ops if isinstance(op, SIMULATED)))
        for stage in lowered.stages
    )
    return replace(lowered, plan="", data=(), stages=stages)
