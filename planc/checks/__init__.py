"""Floor 3: what a plan that is well formed can still get wrong. One rule a file, in this order.

A rule looks at the whole plan and reports what it finds. It concludes nothing from what is missing
in a section that has findings of its own (`Plan.broken`).
"""

from __future__ import annotations

from collections.abc import Callable

from planc.checks.activations import activations
from planc.checks.adapters import adapters
from planc.checks.axes import axes
from planc.checks.bare import bare
from planc.checks.blocks import blocks
from planc.checks.checkpoints import checkpoints
from planc.checks.compiled import compiled
from planc.checks.containers import containers
from planc.checks.counts import counts
from planc.checks.coverage import coverage
from planc.checks.draws import draws
from planc.checks.dtypes import dtypes
from planc.checks.fused import fused
from planc.checks.graphs import graphs
from planc.checks.halves import halves
from planc.checks.heads import heads
from planc.checks.ignored import ignored
from planc.checks.kinds import kinds
from planc.checks.lying import lying
from planc.checks.megatron import megatron
from planc.checks.norms import norms
from planc.checks.offload import offload
from planc.checks.packed import packed
from planc.checks.pairs import pairs
from planc.checks.partners import partners
from planc.checks.precision import precision
from planc.checks.prefetch import prefetch
from planc.checks.quantised import four_bits
from planc.checks.reshard import reshard
from planc.checks.roots import roots
from planc.checks.spread import spread
from planc.checks.stream import stream
from planc.checks.ties import ties
from planc.checks.training import training
from planc.checks.uneven import uneven
from planc.checks.units import units
from planc.checks.unsharded import unsharded
from planc.checks.whole import whole
from planc.diagnostic import Sink
from planc.ir.derive import adapted
from planc.ir.plan import Plan
from planc.model.facts import Facts

Rule = Callable[[Plan, Facts, Sink], None]

RULES: tuple[Rule, ...] = (
    axes,
    containers,
    kinds,
    bare,
    counts,
    packed,
    fused,
    halves,
    heads,
    uneven,
    partners,
    pairs,
    norms,
    stream,
    ties,
    units,
    roots,
    blocks,
    unsharded,
    ignored,
    training,
    dtypes,
    precision,
    reshard,
    spread,
    lying,
    megatron,
    whole,
    offload,
    prefetch,
    checkpoints,
    activations,
    compiled,
    graphs,
    adapters,
    draws,
    four_bits,
    coverage,
)


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Runs every rule; the findings go to the sink.

    Args:
        plan: what elaboration made of it.
        facts: the model that it was elaborated for.
        sink: receives PL15x and PL16x (kinds, pairs and norms), PL18x (adapters), PL2xx (shapes
            and parameters), PL35x (axes), PL4xx (composition) and
            PL68x (weights in 4 bits).
    """
    plan, facts = adapted(plan, facts)
    for rule in RULES:
        rule(plan, facts, sink)
