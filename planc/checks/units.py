"""PL384, PL410 to PL414, PL418, PL419, PL444, PL445, PL449: what FSDP units hold, in what order."""

from collections.abc import Iterable, Sequence

from planc.checks.queries import active, axis_label, holds
from planc.diagnostics.diagnostic import Label, Sink
from planc.ir.nodes import Plan, Unit
from planc.ir.parameter_owners import owned_modules
from planc.ir.unit_lists import entries, lists
from planc.model.facts import Facts, Modules
from planc.model.indices import Indices
from planc.ops.fsdp import Prefetch


def nested_units(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A group is one set of parameters: no member is inside another, and every unit needs some."""
    if plan.fsdp is None:
        return
    ignored = [i.modules for i in plan.fsdp.ignored]
    for unit in plan.fsdp.units:
        for member in unit.members:
            around = (o for o in unit.members if o.path != member.path and holds(o, member))
            if (outer := next(around, None)) is not None:
                message = f"`{member}` is inside `{outer}`, a member of the same group"
                sink.error("PL410", message, unit.origin, help=f"remove `{member}` from the group")
        below = (part for member in unit.members for part in member.below())
        left = any(part.module.parameters and part.parts_outside(ignored) for part in below)
        if sum(m.module.count for m in unit.members) and left:
            continue
        why = [f"`{unit.members[0]}` is a {unit.members[0].module.cls}"]
        if any(i.is_within(m) for i in ignored for m in unit.members):
            why = ["all its parameters are ignored"]
        message = f"the unit `{unit.members[0]}` has no parameters to shard"
        sink.error("PL411", message, unit.origin, facts=why, help="remove the rule")


def fsdp_root(plan: Plan, facts: Facts, sink: Sink) -> None:
    """torch runs a group only below another unit ("FSDP requires a single root module").

    Observed on four processes (torch 2.13); separate units without a root train right, each as its
    own root.
    """
    section = plan.fsdp
    if section is None or "fsdp" in plan.broken or not section.units:
        return
    alone = [u for u in section.units if u.group and not _below_unit(u, section.units)]
    for unit in alone:
        members = ", ".join(str(m) for m in unit.members)
        sink.error(
            "PL418",
            f"the group of `{members}` is in no other unit, and torch runs groups only inside one",
            unit.origin,
            help="write `root : unit`",
        )
    rest = any(o.unit is None and o.ignored is None for o in owned_modules(plan, facts))
    if not alone and not rest and not any(u.root for u in section.units):
        sink.warning(
            "PL419",
            "no unit is the root, so every outermost unit is one",
            section.origin,
            facts=[
                "the model itself is then not an FSDP module: it has no set_requires_gradient_sync"
            ],
            help="write `root : unit(reshard = never)`",
        )


def _below_unit(unit: Unit, units: tuple[Unit, ...]) -> bool:
    """Whether a group needs no root, or has one."""
    if sum(len(m) for m in unit.members) == 1:
        return True
    outer = [m for u in units if u is not unit for m in u.members]
    return any(all(m != o and holds(o, m) for m in unit.members) for o in outer)


def blocks_without_unit(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The parameters of such a block are in the root unit, which is gathered for a whole step."""
    if plan.fsdp is None or "fsdp" in plan.broken:
        return
    members = [(m, u) for u in plan.fsdp.units for m in u.members]
    done: set[tuple[str, ...]] = set()
    for modules in facts.model.below():
        if modules.key[-1:] != ("[]",) or not modules.module.count:
            continue
        same_list = [(m, u) for m, u in members if m.key == modules.key]
        if not same_list or modules.key in done or _is_covered(modules, members):
            continue
        left = modules.parts_outside(member for member, _ in same_list)
        if not left:
            continue
        done.add(modules.key)
        count = sum(len(part) for part in left)
        siblings = Modules(modules.path[:-1], modules.module)
        sink.warning(
            "PL412",
            f"`{left[0]}` ({count} modules) is not a unit, unlike other entries of its list",
            *(Label(span=u.origin, text="these are") for _, u in same_list[:1]),
            facts=["its parameters are in the root unit, which stays gathered"],
            help=f"name the whole list: `{siblings}.* : unit`",
        )


def _is_covered(modules: Modules, members: Sequence[tuple[Modules, object]]) -> bool:
    inner = [m for m, _ in members if m.deeper(modules)]
    held = sum(m.module.count * len(m) for m in inner)
    return held >= modules.module.count * len(modules)


def spread_without_unit(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`spread(...)` changes how parameters of a unit are placed, so a unit must contain them."""
    section = plan.fsdp
    if section is None or not section.spreads or "fsdp" in plan.broken:
        return
    assignments = [o for o in owned_modules(plan, facts) if o.unit is not None]
    for spread in section.spreads:
        gathering_units = [o.unit for o in assignments if o.spread is spread and o.unit]
        same = plan.mesh.size(*section.extra_axes(spread))
        if section.divide is not None and same > 1:
            sink.error(
                "PL384",
                f"`divide` cannot be combined with a `spread` over {same} ranks that have the "
                "same gradient",
                Label(span=spread.origin),
                Label(span=section.divide.origin, text="FSDP has one factor per unit"),
                help="make the modules a unit: `unit(on = ...)`",
            )
        if gathering_units:
            continue
        units = [u for u in section.units if any(m.overlap(spread.modules) for m in u.members)]
        sink.error(
            "PL384",
            f"`spread` has no effect: `{spread.modules}` is in no enclosing FSDP unit",
            Label(span=spread.origin),
            *(Label(span=u.origin, text="is a unit itself") for u in units[:1]),
            help="write `on` and `shard_dim` on the unit: `unit(on = ...)`"
            if units
            else "make an enclosing module a unit, such as `model.layers.* : unit`",
        )


def unreduced_gradients(plan: Plan, facts: Facts, sink: Sink) -> None:
    """FSDP averages the gradients of its units alone. Gradients of parameters outside every unit
    are not all-reduced, so ranks diverge silently.
    """
    if "fsdp" in plan.broken:
        return
    if plan.fsdp is None:
        _warn_mixed_tensors(plan, sink)
        return
    if plan.mesh.size(*plan.fsdp.shard, *plan.fsdp.replicate) == 1:
        return
    outside = [
        (assignment.modules, p)
        for assignment in owned_modules(plan, facts)
        if assignment.unit is None and assignment.ignored is None
        for p in assignment.modules.module.parameters
        if assignment.trains(p)
    ]
    if outside:
        names = [f"{m}.{p.name}" for m, p in outside]
        shown = ", ".join(f"`{n}`" for n in names[:3]) + (", ..." if len(names) > 3 else "")
        sink.error(
            "PL413",
            f"no FSDP unit contains {shown}: their gradients are not reduced, so the ranks diverge",
            plan.fsdp.origin,
            help="write `root : unit`, which contains the parameters of no other unit",
        )


def _warn_mixed_tensors(plan: Plan, sink: Sink) -> None:
    rules = active(plan)
    if rules:
        sink.warning(
            "PL414",
            "tensor parallelism without an fsdp section mixes DTensors and plain tensors",
            rules[0].origin,
            axis_label(plan, rules[0]),
            facts=[
                "torch's optimizers (foreach, the default) and clip_grad_norm_ do not support "
                "the mix"
            ],
            help="add an fsdp section; over an axis of one rank it only turns all parameters "
            "into DTensors",
        )


def prefetch(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Prefetching runs from entry to entry of a list of units; backward ends, as FSDP's own
    prefetching does, at the first trainable block: the frozen ones before it would be gathered for
    nothing.
    """
    section = plan.fsdp
    if section is None or section.prefetch is None or not section.shard or "fsdp" in plan.broken:
        return
    unit_lists = lists(plan, facts)
    if not unit_lists:
        message = "`prefetch` has no effect: no entries of a module list are units"
        help = "make the blocks units: `model.layers.* : unit`"
        sink.error("PL444", message, section.prefetch.origin, help=help)
    _deep(section.prefetch, unit_lists, sink)
    if not section.prefetch.backward or not plan.freezes_known:
        return
    for units in unit_lists:
        gap = _skipped_units(units, plan, facts)
        if gap is not None:
            sink.error(
                "PL445",
                f"backward stops before `{gap}`, which is frozen like all before it, and "
                "prefetching would all-gather it needlessly",
                Label(span=section.prefetch.origin, text="gathers the entries before"),
                *_frozen(gap, plan),
                help=f"remove `backward`, or put the frozen blocks into one unit: `group({gap}) : "
                "unit`",
            )


def _deep(wanted: Prefetch, unit_lists: Iterable[tuple[Modules, ...]], sink: Sink) -> None:
    """A depth of at least the list's length all-gathers the whole list at once."""
    longest = max((len(entries(units)) for units in unit_lists), default=0)
    for name in ("forward", "backward"):
        depth = getattr(wanted, name)
        if longest and depth >= longest:
            sink.warning(
                "PL449",
                f"`{name} = {depth}` all-gathers the whole list ahead: it has {longest} entries",
                wanted.origin,
                help="1 or 2 overlap the communication with the computation of one or two entries",
            )


def _skipped_units(units: tuple[Modules, ...], plan: Plan, facts: Facts) -> Modules | None:
    """The frozen units at the start of a list that has a trainable entry later."""
    at = units[0].list_at
    assert at is not None
    first: int | None = None
    for assignment in owned_modules(plan, facts):
        if not assignment.has_trainable:
            continue
        segment = assignment.modules.path[at] if len(assignment.modules.path) > at else ""
        if assignment.modules.key[: at + 1] == units[0].key[: at + 1] and not isinstance(
            segment, str
        ):
            first = segment.first if first is None else min(first, segment.first)
        elif first is None:
            return None  # a trainable module before the list: the backward pass goes through it
    frozen = Indices.from_numbers(i for i in entries(units) if first is not None and i < first)
    return units[0].with_entries(frozen) if frozen else None


def _frozen(gap: Modules, plan: Plan) -> list[Label]:
    return [
        Label(span=rule.origin, text="frozen")
        for rule in plan.freezes
        if not rule.trainable and (gap.is_within(rule.modules) or rule.modules.is_within(gap))
    ]
