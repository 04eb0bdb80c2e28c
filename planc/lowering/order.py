"""The order of units: one inside another comes first."""

from __future__ import annotations

from collections.abc import Iterable

from planc.ir.plan import Unit


def inner_first(units: Iterable[Unit]) -> list[Unit]:
    """The plan's order, but a unit never before one inside it; the root comes last by that."""
    rest = list(units)
    ordered: list[Unit] = []
    while rest:
        ready = next(
            (u for u in rest if not any(_holds(u, o) for o in rest if o is not u)), rest[0]
        )
        ordered.append(ready)
        rest.remove(ready)
    return ordered


def _holds(outer: Unit, inner: Unit) -> bool:
    return any(
        len(i.path) > len(o.path) and i.within(o) for o in outer.members for i in inner.members
    )
