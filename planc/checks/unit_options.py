"""PL381 to PL383, PL417, PL442, PL443, PL447, PL450: axes and options that a unit cannot have."""

from math import prod

from planc.checks.queries import active
from planc.diagnostics.diagnostic import Label, Sink, did_you_mean, one_of
from planc.diagnostics.source import Span
from planc.infer.apply_adapters import styles
from planc.ir.local_shapes import placed_parameters, split_dim
from planc.ir.mesh_axes import valid_axes
from planc.ir.nodes import Fsdp, Plan, SpreadRule, TensorRule, Unit
from planc.ir.parameter_owners import Owned, owned_modules
from planc.model.facts import Facts, Modules
from planc.ops.styles import PARAMETERLESS, Replicated, style_name


def partial_reshard(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`reshard = N` reshards to groups of N ranks, so N must divide the unit's number of ranks.

    Source: `fully_shard` in torch takes a non-trivial divisor of the shard mesh's size.
    """
    if plan.fsdp is None:
        return
    spread = [(o.unit, o.spread) for o in owned_modules(plan, facts) if o.unit and o.spread]
    pairs: list[tuple[Unit, Unit | SpreadRule]] = [(u, u) for u in plan.fsdp.units]
    for unit, part in dict.fromkeys([*pairs, *spread]):
        shard, _ = plan.fsdp.axes(part)
        size = plan.mesh.size(*shard)
        count = unit.reshard
        if isinstance(count, bool) or (1 < count < size and size % count == 0):
            continue
        if size == 1 and plan.mesh.assumed:
            continue
        choices = [n for n in range(2, min(size, 1024)) if size % n == 0]
        labels = [a.label for a in plan.mesh.axes if a.name in shard]
        words = {
            1: "the shard of one rank would be the full parameter: write `never`",
            size: "write `always`",
        }
        advice = f"it can be {one_of(map(str, choices[:8]))}, or `always`"
        advice = words.get(count) or (advice if choices else "write `always`, or `never`")
        advice = "write `always`, or `never`" if size == 1 else advice
        sink.error(
            "PL417",
            f"{size} rank{'s' if size > 1 else ''} cannot reshard to {count}{_why(count, size)}",
            Label(span=unit.origin),
            *([Label(span=part.origin, text="shards over other axes")] if part is not unit else []),
            *labels,
            help=advice,
        )


def _why(count: int, size: int) -> str:
    if size == 1:
        return ": there is nothing to reshard"
    if count == size:
        return ": the unit is sharded over that many ranks already"
    return f": it does not divide {size}" if count > 1 else ""


def backend(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Another library than torch says itself what it refuses."""
    if plan.fsdp is not None and plan.fsdp.backend is not None and "fsdp" not in plan.broken:
        operation = plan.fsdp.backend
        operation.part("checks").check(plan, plan.fsdp, operation, facts, sink)


def unit_axes(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`on` takes a subset of the section's axes, and `shard_dim` a dim that the parameters have.

    Over other axes nothing would average a unit's gradients, except those of tensor parallelism,
    whose ranks have equal gradients of unstyled parameters. torch shards dim 0 unevenly and any
    other dim only evenly, so parameters that do not divide stay sharded on dim 0.
    """
    section = plan.fsdp
    if section is None or "fsdp" in plan.broken:
        return
    assignments = list(owned_modules(plan, facts))
    for part in section.parts:
        if part.shard is not None:
            _axes(part, section, plan, sink)
            _check_styled(part, assignments, section, plan, sink)
    for part in section.parts if section.shard and "tensor" not in plan.broken else ():
        parameters = list(placed_parameters(part, assignments, plan))
        ranks = plan.mesh.size(*section.axes(part)[0])
        if part.shard_dim > 0:
            _dim(part, parameters, ranks, sink)
        if part.shard_dim >= 0 and "expert" not in plan.broken:
            _short(part, parameters, ranks, sink)


def _axes(unit: Unit | SpreadRule, section: Fsdp, plan: Plan, sink: Sink) -> None:
    assert unit.shard is not None
    tensor = dict.fromkeys(r.axis for r in plan.tensor)
    experts = section.experts.sizes if section.experts else ()
    known = tuple(dict.fromkeys((*section.replicate, *section.shard, *tensor, *experts)))
    if "tensor" in plan.broken:
        return
    # what `ep_shard` has of one rank splits nothing, whatever the section is on
    single = {
        a.name for a in plan.mesh.axes if a.size == 1 and not set(known).isdisjoint(unit.shard)
    }
    either = {*known, *single}
    wrong = [a for i, a in enumerate(unit.shard) if a not in either or a in unit.shard[:i]]
    if wrong and section.shard:
        named = one_of((f"`{a}`" for a in known), last="and")
        said = "named twice" if wrong[0] in known else "no axis of the section"
        help = "name some of these; the unit is replicated over the others"
        if plan.mesh.axis(wrong[0]) is None:
            help = did_you_mean(wrong[0], valid_axes(plan.mesh.names), help) or help
        sink.error(
            "PL442",
            f"a unit cannot be sharded over `{' * '.join(unit.shard)}`: `{wrong[0]}` is {said}",
            unit.origin,
            facts=[f"the sections use {named}"],
            help=help,
        )


def _check_styled(
    part: Unit | SpreadRule, assignments: list[Owned], section: Fsdp, plan: Plan, sink: Sink
) -> None:
    """PL381: styled parameters are DTensors on their axis' mesh, which FSDP puts beside its own:
    they cannot share an axis. Source: `_init_sharding_spec_tp` in torch's `_fsdp_param`.
    """
    beyond = plan.mesh.wide(section.extra_axes(part))
    if not beyond or {"tensor", "expert"} & plan.broken:
        return
    of_part = [o for o in assignments if (o.spread or o.unit) is part]
    for rule in (*active(plan), *styles(plan)):
        around = isinstance(rule.style, PARAMETERLESS) or rule.style == Replicated()
        if rule.axis not in beyond or around:
            continue
        both = next((b for o in of_part if (b := _met(rule, o.modules))), None)
        if both is None:
            continue
        sink.error(
            "PL381",
            f"a unit cannot be sharded over `{rule.axis}`: a style has `{both}` on it",
            Label(span=part.origin, text="shards over it"),
            Label(span=rule.origin, text=f"{style_name(rule.style)}, on {rule.axis}"),
            help=f"remove the style, or remove `{rule.axis}` from `on`",
        )
        return


def _met(rule: TensorRule, modules: Modules) -> Modules | None:
    """The modules' parameters that a rule decides: all inside for `replicate(gradient = sum)`."""
    inside = isinstance(rule.style, Replicated)
    return modules.part_inside(rule.modules) if inside else modules.overlap(rule.modules)


_Held = list[tuple[str, tuple[int, ...]]]


def _dim(part: Unit | SpreadRule, parameters: _Held, ranks: int, sink: Sink) -> None:
    """PL443 where a dim shards nothing; PL382 where it leaves out the largest parameters."""
    dim = part.shard_dim
    having = [(name, shape) for name, shape in parameters if len(shape) > dim]
    uneven = [(name, shape) for name, shape in having if shape[dim] % ranks]
    if len(uneven) == len(having):
        what = f"has a dim {dim} divisible by {ranks}" if having else f"has a dim {dim}"
        named = part.modules if isinstance(part, SpreadRule) else part.members[0]
        sink.error(
            "PL443",
            f"`shard_dim = {dim}` shards nothing: no parameter of `{named}` {what}",
            part.origin,
            facts=[f"{name} is {list(shape)}" for name, shape in having[:3]],
            help="remove `shard_dim`, or name a dim that the parameters have",
        )
        return
    left = [(name, shape) for name, shape in uneven if shape[0] < ranks]
    if left:
        sink.error(
            "PL382",
            f"`shard_dim = {dim}`: dim {dim} is not divisible by {ranks:,} ranks",
            part.origin,
            facts=[f"{name} is {list(shape)}, too few rows for dim 0" for name, shape in left[:3]],
            help="name another dim, or fewer axes by `on = ...`",
        )


_LARGE = 2**20
"""Parameters of one tensor that are worth a word."""


def _short(part: Unit | SpreadRule, parameters: _Held, ranks: int, sink: Sink) -> None:
    """PL383: fewer rows than ranks, which FSDP pads on every rank (`padded_sharded_param_size`)."""
    short = [
        (name, shape)
        for name, shape in parameters
        if len(shape) > 1
        and 2 * shape[0] <= ranks
        and prod(shape) >= _LARGE
        and not split_dim(shape, part.shard_dim, ranks)
    ]
    if not short:
        return
    name, shape = max(short, key=lambda pair: prod(pair[1]))
    sink.info(
        "PL383",
        f"`{name}` has {shape[0]} rows for {ranks:,} ranks: {ranks - shape[0]:,} ranks hold "
        f"nothing, and each all-gather allocates {ranks // shape[0]} times its size",
        part.origin,
        facts=[f"it is {list(shape)}, sharded on dim 0"],
        help="`shard_dim = auto` shards another dim where there are too few rows",
    )


def replicate_options(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A replicate section keeps whole parameters: there is nothing to gather, reshard or place.

    Source: `replicate` in torch.distributed._composable.replicate_with_fsdp takes neither
    `reshard_after_forward` nor `shard_placement_fn`.
    """
    section = plan.fsdp
    if section is None or section.shard or "fsdp" in plan.broken:
        return
    said: list[tuple[str, Span]] = []
    for unit in section.units:
        if unit.reshard is not True:
            said.append(("reshard", unit.origin))
        if unit.shard is not None:
            said.append(("on", unit.origin))
        if unit.shard_dim:
            said.append(("shard_dim", unit.origin))
    said += [("spread", spread.origin) for spread in section.spreads]
    if section.prefetch is not None:
        said.append(("prefetch", section.prefetch.origin))
    for name, origin in dict.fromkeys(said):
        sink.error(
            "PL450",
            f"`{name}` has no effect where parameters are replicated on every rank",
            Label(span=origin),
            Label(span=section.origin, text="replicates the model"),
            help=f"remove `{name}`, or write an fsdp section",
        )


def cpu_offload(plan: Plan, facts: Facts, sink: Sink) -> None:
    """An offloaded unit copies its shards to the device and frees them after forward.

    A unit that is not resharded keeps its gathered parameters on the device until backward ends. If
    no unit is resharded, the whole model is on the device at once and offloading only adds copies.
    """
    section = plan.fsdp
    if section is None or section.offload is None or "fsdp" in plan.broken:
        return
    if not section.shard:
        labels = [Label(span=section.origin, text="keeps full parameters on every rank")]
    elif section.units and all(unit.reshard is False for unit in section.units):
        labels = [
            Label(span=u.origin, text="keeps its parameters gathered") for u in section.units[:3]
        ]
    else:
        return
    sink.error(
        "PL447",
        "`offload` has no effect: every unit stays gathered from forward to backward",
        Label(span=section.offload.origin, text="offloads parameters"),
        *labels,
        help="shard the model, and let units reshard after forward",
    )
