"""The model as a lowered plan from JSON leaves it: what `why` looks into.

The compiler has it at hand for every other plan (`Compiled.applied`).
"""

from __future__ import annotations

from dataclasses import replace

from planc.model.facts import Facts, Modules
from planc.ops import phrases
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.quantization import Quantize
from planc.plan import ir
from planc.plan.apply_adapters import adapted
from planc.plan.ir import AdapterRule, Adapters, Mesh, Plan, Quant
from planc.source import Source


def as_applied(facts: Facts, lowered: Lowered) -> tuple[Plan, Facts]:
    """The model with the adapters that a plan puts in, and what knows the dtypes that it keeps."""
    nowhere = Source("", "").span(0, 0)
    rules = tuple(
        AdapterRule(
            modules=Modules(members.path, facts.at(next(members.names())).module),
            rank=op.rank,
            alpha=op.alpha,
            dropout=op.dropout,
            dtype=op.dtype,
            init=op.init,
            quant=_quant(lowered, members),
            origin=nowhere,
        )
        for op in lowered.ops
        if isinstance(op, Adapt)
        for members in op.members
    )
    mesh = Mesh(axes=(), origin=nowhere)
    adapters = Adapters(rules=rules, origin=nowhere)
    plan = Plan(name="", families=(), options={}, mesh=mesh, adapters=adapters, origin=nowhere)
    for op in lowered.ops:
        if isinstance(op, Load):
            kept = ir.Load(dtype=op.dtype, islands=bool(op.fp32), origin=nowhere)
            plan = replace(plan, load=kept)
    return adapted(plan, facts)


def _quant(lowered: Lowered, members: Modules) -> Quant | None:
    """How adapted layers are kept in 4 bits; an operation's rule has one word for all of them."""
    for op in (o for o in lowered.ops if isinstance(o, Quantize)):
        if any(phrases.layer(m).overlap(members) is not None for m in op.members):
            return Quant(
                kind=op.kind,
                storage=op.storage,
                compute=op.compute,
                double=op.double,
                block=op.block,
            )
    return None
