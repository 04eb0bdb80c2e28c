"""Lists of FSDP units: the blocks of a model, along which parameters can be prefetched."""

from collections.abc import Iterable, Iterator

from planc.ir.nodes import Plan
from planc.model.facts import Child, Facts, Modules, Segment, merge_sets
from planc.model.indices import Indices


def lists(plan: Plan, facts: Facts) -> tuple[tuple[Modules, ...], ...]:
    """The units inside each list of modules that has units in several entries.

    Returns:
        For each outermost list its units as sets, in the order in which an entry runs them: the
        model's definition order, outer units before the units inside them. Groups are left out.
    """
    order: dict[tuple[str, ...], int] = {}
    for modules in facts.model.below():
        order.setdefault(modules.key, len(order))
    modules_by_list: dict[tuple[str, ...], list[Modules]] = {}
    for unit in plan.fsdp.units if plan.fsdp else ():
        first = unit.members[0]
        if not unit.group and first.list_at is not None:
            modules_by_list.setdefault(first.key[: first.list_at], []).append(first)
    kept = [s for s in map(merge_sets, modules_by_list.values()) if len(entries(s)) > 1]
    return tuple(tuple(sorted(s, key=lambda m: order.get(m.key, 0))) for s in kept)


def entries(units: tuple[Modules, ...] | list[Modules]) -> Indices:
    result = Indices(0)
    for modules in units:
        result |= modules.entries
    return result


def of_entry(modules: Modules, index: int) -> Modules | None:
    """The modules that are in one entry of their outermost list."""
    return modules.with_entries(Indices.from_numbers([index])) if index in modules.entries else None


def split_child(at: Modules, child: Child, sets: Iterable[Modules]) -> Iterator[Modules]:
    """A child of modules; of a list, entries are apart where a set has only some of them."""
    key, depth = Modules((*at.path, child.segment), child.module).key, len(at.path)
    parts = [child.indices] if child.indices is not None else []
    for modules in sets:
        taken = modules.path[depth] if len(modules.path) > depth else None
        if isinstance(taken, Indices) and modules.key[: depth + 1] == key:
            parts = [p for part in parts for p in (part & taken, part - taken) if p]
    segments: tuple[Segment, ...] = tuple(parts) or (child.segment,)
    yield from (Modules((*at.path, segment), child.module) for segment in segments)
