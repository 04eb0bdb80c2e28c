"""PL442, PL443, PL381: axes that a unit cannot have for itself, and a dim that nothing splits."""

from __future__ import annotations

from planc.checks.table import active, split_dim
from planc.diagnostic import Label, Sink, one_of
from planc.ir.derive import AROUND, styles
from planc.ir.owners import Owned, owned
from planc.ir.plan import Fsdp, Plan, TensorRule, Unit
from planc.ir.style import Replicated, style_name
from planc.model.facts import Facts, Modules, Parameter


def spread(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`on` takes some of the section's axes, and `shard_dim` a dim that parameters have.

    Over other axes than the section's nothing would average a unit's gradients, but for those of
    tensor parallelism, whose ranks have the same gradient of what no style splits. torch splits
    dim 0 unevenly too, any other evenly alone, so what does not divide stays on dim 0.
    """
    section = plan.fsdp
    if section is None or "fsdp" in plan.broken:
        return
    for unit in section.units:
        if unit.shard is not None:
            _axes(unit, section, plan, sink)
            _styled(unit, section, plan, facts, sink)
    dims = [u for u in section.units if u.shard_dim and section.shard]
    found = list(owned(plan, facts)) if dims else []
    for unit in dims:
        _dim(unit, [own for own in found if own.unit is unit], section, plan, sink)


def _axes(unit: Unit, section: Fsdp, plan: Plan, sink: Sink) -> None:
    assert unit.shard is not None
    tensor = dict.fromkeys(r.axis for r in plan.tensor)
    known = tuple(dict.fromkeys((*section.replicate, *section.shard, *tensor)))
    if "tensor" in plan.broken:
        return
    wrong = [a for i, a in enumerate(unit.shard) if a not in known or a in unit.shard[:i]]
    if wrong and section.shard:
        named = one_of((f"`{a}`" for a in known), last="and")
        said = "named twice" if wrong[0] in known else "no axis of the section"
        sink.error(
            "PL442",
            f"a unit cannot be sharded over `{' * '.join(unit.shard)}`: `{wrong[0]}` is {said}",
            unit.origin,
            facts=[f"the sections work over {named}"],
            help="name some of these; over the rest the unit is copied",
        )


def _styled(unit: Unit, section: Fsdp, plan: Plan, facts: Facts, sink: Sink) -> None:
    """PL381: FSDP can't split over an axis what a style has on it already.

    Parameters of a style are DTensors on the mesh of its axis, which FSDP puts beside its own
    (`_init_sharding_spec_tp` in torch's `_fsdp_param`); the two cannot share an axis.
    """
    beyond = [a for a in section.beyond(unit) if plan.mesh.size(a) > 1]
    if not beyond or "tensor" in plan.broken:
        return
    own = [o for o in owned(plan, facts) if o.unit is unit]
    for rule in (*active(plan), *styles(plan)):
        around = isinstance(rule.style, AROUND) or rule.style == Replicated()
        if rule.axis not in beyond or around:
            continue
        both = next((b for o in own if (b := _met(rule, o.modules))), None)
        if both is None:
            continue
        sink.error(
            "PL381",
            f"a unit cannot be sharded over `{rule.axis}`: a style has `{both}` on it",
            Label(span=unit.origin, text="the unit"),
            Label(span=rule.origin, text=f"{style_name(rule.style)}, on {rule.axis}"),
            help=f"take the style out, or take `{rule.axis}` out of `on`",
        )
        return


def _met(rule: TensorRule, modules: Modules) -> Modules | None:
    """What a rule has of some modules' parameters: `replicate(gradient = sum)` has all inside."""
    inside = isinstance(rule.style, Replicated)
    return modules.inside(rule.modules) if inside else modules.overlap(rule.modules)


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
