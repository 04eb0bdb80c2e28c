"""The axes whose ranks must draw the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator

from planc.model.facts import Facts
from planc.model.randomness import random_fields
from planc.ops.rng import SyncRng
from planc.plan.ir import Plan


def sync_rng(plan: Plan, facts: Facts) -> Iterator[SyncRng]:
    """One operation for each tensor axis: its ranks work on the same activations.

    Ranks whose dropout masks or router jitter differ compute different models. Observed on four
    processes with different seeds (torch 2.13): gradients of gpt2 with dropout, and of mixtral with
    router jitter, are wrong by more than 1%.
    """
    fields = random_fields(facts)
    split = dict.fromkeys(r.axis for r in plan.tensor if plan.mesh.size(r.axis) > 1)
    for axis in split if fields else ():
        yield SyncRng(axis=axis, fields=fields)
