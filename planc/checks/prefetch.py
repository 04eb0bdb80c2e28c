"""PL444, PL445, PL449: prefetching without a list of units, into frozen units, or all units."""

from collections.abc import Iterable

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts, Modules
from planc.ops.fsdp import Prefetch
from planc.plan.ir import Plan
from planc.plan.parameter_owners import owned
from planc.plan.unit_lists import entries, lists


def prefetch(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Prefetching runs from entry to entry of a list of units.

    The backward pass ends where no earlier parameter needs a gradient, so the first trainable block
    would all-gather the frozen blocks before it for nothing. FSDP's own prefetching stops there.
    """
    section = plan.fsdp
    if section is None or section.prefetch is None or not section.shard or "fsdp" in plan.broken:
        return
    found = lists(plan, facts)
    if not found:
        message = "`prefetch` has no effect: no entries of a module list are units"
        help = "make the blocks units: `model.layers.* : unit`"
        sink.error("PL444", message, section.prefetch.origin, help=help)
    _deep(section.prefetch, found, sink)
    if not section.prefetch.backward or "train" in plan.broken:
        return
    for units in found:
        gap = _skipped(units, plan, facts)
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


def _deep(wanted: Prefetch, found: Iterable[tuple[Modules, ...]], sink: Sink) -> None:
    """A depth of at least the list's length all-gathers the whole list at once."""
    longest = max((len(entries(units)) for units in found), default=0)
    for name in ("forward", "backward"):
        depth = getattr(wanted, name)
        if longest and depth >= longest:
            sink.warning(
                "PL449",
                f"`{name} = {depth}` all-gathers the whole list ahead: it has {longest} entries",
                wanted.origin,
                help="1 or 2 overlap the communication with the computation of one or two entries",
            )


def _skipped(units: tuple[Modules, ...], plan: Plan, facts: Facts) -> Modules | None:
    """The frozen units at the start of a list that has a trainable entry later."""
    members = list(owned(plan, facts))
    at = units[0].list_at
    assert at is not None
    first: int | None = None
    reached = False
    for own in members:
        if not any(own.trains(p) for p in own.modules.module.parameters):
            continue
        segment = own.modules.path[at] if len(own.modules.path) > at else ""
        if own.modules.key[: at + 1] == units[0].key[: at + 1] and not isinstance(segment, str):
            first = segment.first if first is None else min(first, segment.first)
            reached = True
        elif not reached:
            return None  # a trainable module before the list: the backward pass goes through it
    if first is None:
        return None
    every = entries(units)
    frozen = type(every).of(i for i in every if i < first)
    if not frozen:
        return None
    return units[0].with_entries(frozen)


def _frozen(gap: Modules, plan: Plan) -> list[Label]:
    return [
        Label(span=rule.origin, text="frozen")
        for rule in plan.train
        if not rule.trainable and (gap.within(rule.modules) or rule.modules.within(gap))
    ]
