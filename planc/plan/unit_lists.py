"""Lists of FSDP units: the blocks of a model, along which parameters can be prefetched."""

from planc.model.facts import Facts, Modules, Segment
from planc.model.indices import Indices
from planc.plan.ir import Plan


def lists(plan: Plan, facts: Facts) -> tuple[tuple[Modules, ...], ...]:
    """The units inside each list of modules that has units in several entries.

    Returns:
        For each outermost list its units as sets, in the order in which an entry runs them: the
        model's definition order, outer units before the units inside them. Groups are left out.
    """
    order: dict[tuple[str, ...], int] = {}
    for modules in facts.model.below():
        order.setdefault(modules.key, len(order))
    found: dict[tuple[str, ...], list[Modules]] = {}
    for unit in plan.fsdp.units if plan.fsdp else ():
        at = entry(unit.members[0])
        if not unit.group and at is not None:
            some = found.setdefault(unit.members[0].key[:at], [])
            _add(some, unit.members[0])
    kept = [s for s in found.values() if len(entries(s)) > 1]
    return tuple(tuple(sorted(s, key=lambda m: order.get(m.key, 0))) for s in kept)


def _add(some: list[Modules], modules: Modules) -> None:
    for i, other in enumerate(some):
        union = other.union(modules)
        if union is not None:
            some[i] = union
            return
    some.append(modules)


def entry(modules: Modules) -> int | None:
    """The position in a path that selects entries of its outermost list."""
    return next((i for i, s in enumerate(modules.path) if isinstance(s, Indices)), None)


def entries(units: tuple[Modules, ...] | list[Modules]) -> Indices:
    """The entries of a list that have units."""
    result = Indices(0)
    for modules in units:
        at = entry(modules)
        segment: Segment = "" if at is None else modules.path[at]
        if isinstance(segment, Indices):
            result |= segment
    return result


def of_entry(modules: Modules, index: int) -> Modules | None:
    """The modules that are in one entry of their outermost list."""
    at = entry(modules)
    segment = "" if at is None else modules.path[at]
    if at is None or not isinstance(segment, Indices) or index not in segment:
        return None
    path = (*modules.path[:at], Indices.of([index]), *modules.path[at + 1 :])
    return Modules(path, modules.module)
