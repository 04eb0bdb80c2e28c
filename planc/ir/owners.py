"""Which unit a parameter belongs to: the innermost one around the module that holds it."""

from __future__ import annotations

from collections.abc import Iterator

from planc.ir.plan import Plan, Unit
from planc.model.facts import Facts, Modules


def owned(plan: Plan, facts: Facts) -> Iterator[tuple[Modules, Unit | None]]:
    """Every module that has parameters of its own, by the unit that shards them.

    Modules that no unit is around come with None; so do all of a plan without an fsdp section.
    """
    units = plan.fsdp.units if plan.fsdp else ()
    members = sorted(((m, u) for u in units for m in u.members), key=lambda mu: -len(mu[0].path))
    for modules in facts.model.below():
        if not modules.module.parameters:
            continue
        left = [modules]
        for member, unit in members:
            for part in list(left):
                both = part.inside(member)
                if both is not None:
                    left.remove(part)
                    left.extend(part.minus(both))
                    yield both, unit
        yield from ((part, None) for part in left)
