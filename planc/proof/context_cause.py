"""Whether a plan is wrong because ranks have parts of sequences: it is right with whole ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

from planc.compiler import Compiled
from planc.proof.judge import judge
from planc.proof.small_case import SmallCase, small_case
from planc.proof.small_mesh import with_experts
from planc.trial.outcome import Outcome


def blamed(
    outcome: Outcome, compiled: Compiled, sizes: Mapping[str, int], parts: Collection[str]
) -> Outcome:
    """A refuted outcome, whose first discrepancy is that of the context section if that is so.

    Args:
        outcome: of the small mesh.
        compiled: the plan.
        sizes: of the small mesh.
        parts: the axes that split sequences.
    """
    assert compiled.plan is not None
    whole = {axis: 1 if axis in parts else size for axis, size in sizes.items()}
    if whole == dict(sizes) or not outcome.discrepancies:
        return outcome
    if prod(whole.values()) > 1:
        case = small_case(compiled, with_experts(whole, compiled.plan.mesh))
        if not isinstance(case, SmallCase) or judge(case).verdict != "proved":
            return outcome
    first, *others = outcome.discrepancies
    return replace(outcome, discrepancies=(replace(first, kind="context"), *others))
