"""The axes whose ranks have to draw random numbers alike."""

from __future__ import annotations

from collections.abc import Iterator

from planc.model.facts import Facts
from planc.model.randomness import random_fields
from planc.ops.rng import SyncRng
from planc.plan.ir import Plan


def sync_rng(plan: Plan, facts: Facts) -> Iterator[SyncRng]:
    """One for each tensor axis: its ranks work on the same activations.

    A rank that drops, or scatters, other parts of them than its neighbours computes another model
    than they do. Found on four processes with seeds of their own (torch 2.13): gradients of gpt2
    with dropout, and of mixtral with router jitter, are wrong by more than a hundredth.
    """
    fields = random_fields(facts)
    split = dict.fromkeys(r.axis for r in plan.tensor if plan.mesh.size(r.axis) > 1)
    for axis in split if fields else ():
        yield SyncRng(axis=axis, fields=fields)
