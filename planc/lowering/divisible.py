"""Whether the ranks of a mesh can split a step's batch."""

from __future__ import annotations

from planc.diagnostic import Label, Sink
from planc.lowering.step import Step
from planc.ops.base import AxisRole
from planc.plan.ir import Mesh


def require_divisible(step: Step, mesh: Mesh | None, sink: Sink) -> None:
    """Reports unless each rank gets whole rows, and equal runs of the tokens of a row.

    Args:
        step: what it has no number of is not judged.
        mesh: of the plan; None for a lowered plan, which has no lines to point at.
        sink: receives PL702.
    """
    (rows, tokens), parts = step.among, step.passes
    for size, what, among, role, more in (
        (step.batch, "rows", rows, AxisRole.DATA, (parts, "micro-batches")),
        (step.sequence, "tokens of a row", tokens, AxisRole.SEQUENCE, (step.runs, "runs of each")),
    ):
        if size is None or size % among == 0:
            continue
        axes = mesh.of_role(role) if mesh else ()
        wide = [a for a in axes if a.size > 1] or axes[:1]
        named = " * ".join(f"{a.name} {a.size}" for a in axes)
        named += f" * {more[0]} {more[1]}" if axes and more[0] > 1 else ""
        sink.error(
            "PL702",
            f"{size} {what} cannot be split among {among}" + (f" ({named})" if named else ""),
            *(Label(span=a.origin, text=f"{a.name} is {a.size}") for a in wide),
            help=f"use a multiple of {among}, or another mesh",
        )
