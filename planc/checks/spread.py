"""PL442, PL443: axes that a unit cannot have for itself, and a dim along which nothing splits."""

from __future__ import annotations

from planc.checks.table import active, split_dim
from planc.diagnostic import Sink, one_of
from planc.ir.owners import Owned, owned
from planc.ir.plan import Fsdp, Plan, Unit
from planc.model.facts import Facts, Parameter


def spread(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`on` takes some of the section's axes, and `shard_dim` a dim that parameters have.

    Over other axes than the section's nothing would average a unit's gradients. torch splits dim 0
    unevenly too, any other evenly alone, so what does not divide stays on dim 0.
    """
    section = plan.fsdp
    if section is None or "fsdp" in plan.broken:
        return
    for unit in section.units:
        if unit.shard is not None:
            _axes(unit, section, sink)
    dims = [u for u in section.units if u.shard_dim and section.shard]
    found = list(owned(plan, facts)) if dims else []
    for unit in dims:
        _dim(unit, [own for own in found if own.unit is unit], section, plan, sink)


def _axes(unit: Unit, section: Fsdp, sink: Sink) -> None:
    assert unit.shard is not None
    known = (*section.replicate, *section.shard)
    wrong = [a for i, a in enumerate(unit.shard) if a not in known or a in unit.shard[:i]]
    if wrong and section.shard:
        named = one_of((f"`{a}`" for a in known), last="and")
        said = "named twice" if wrong[0] in known else "no axis of the section"
        sink.error(
            "PL442",
            f"a unit cannot be sharded over `{' * '.join(unit.shard)}`: `{wrong[0]}` is {said}",
            unit.origin,
            facts=[f"the section works over {named}"],
            help="name some of these; over the rest the unit is copied",
        )


def _dim(unit: Unit, own: list[Owned], section: Fsdp, plan: Plan, sink: Sink) -> None:
    ranks = plan.mesh.size(*section.axes(unit)[0])
    dim = unit.shard_dim
    having = [(o, p) for o in own for p in o.modules.module.parameters if len(p.shape) > dim]
    uneven = [(o, p) for o, p in having if _local(o, p, dim, plan) % ranks]
    if len(uneven) < len(having):
        return
    facts = [f"{o.modules}.{p.name} is {list(p.shape)}" for o, p in having[:3]]
    what = f"has a dim {dim} that divides by {ranks}" if having else f"has a dim {dim}"
    sink.error(
        "PL443",
        f"`shard_dim = {dim}` splits nothing: no parameter of `{unit.members[0]}` {what}",
        unit.origin,
        facts=facts,
        help="take `shard_dim` out, or name a dim that the parameters have",
    )


def _local(own: Owned, parameter: Parameter, dim: int, plan: Plan) -> int:
    """The size of a dim that tensor parallelism leaves to split."""
    size = parameter.shape[dim]
    for rule in active(plan):
        if rule.modules.overlap(own.modules) and split_dim(rule, parameter) == dim:
            size = -(-size // plan.mesh.size(rule.axis))
    return size
