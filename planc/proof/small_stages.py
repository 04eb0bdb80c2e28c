"""The stages of a pipeline on a small mesh: neighboring stages of the real one joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planc.plan.ir import Plan


def with_stages(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """The plan with as many stages as the ranks of a small mesh have.

    A rank keeps its number of stages. Where the mesh has one rank along the axis, there is no
    pipeline.

    Args:
        plan: for the real model.
        sizes: of the small mesh, by axis.
    """
    if plan.pipeline is None:
        return plan
    op = plan.pipeline.op
    ranks = sizes[op.axis]
    if ranks == 1:
        return replace(plan, pipeline=None)
    count = ranks * (op.stages // plan.mesh.size(op.axis))
    cut = tuple(op.bounds[i * op.stages // count] for i in range(count + 1))
    return replace(plan, pipeline=replace(plan.pipeline, op=replace(op, bounds=cut)))
