"""Reduces the mesh of a run to a few processes."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered, MeshAxis

_FIRST = (
    AxisRole.TENSOR,
    AxisRole.DATA,
    AxisRole.EXPERT,
    AxisRole.SEQUENCE,
    AxisRole.STAGE,
)
"""The order in which axes get processes, if there are not enough."""


def small_sizes(axes: Iterable[MeshAxis], processes: int) -> dict[str, int]:
    """The size of each axis on a few processes.

    Axes of more than one rank keep more than one while there are processes left; the remaining
    factors are distributed in turn. A mesh that already fits is unchanged.

    Args:
        axes: the axes of the original mesh.
        processes: the number of processes.
    """
    axes = tuple(axes)
    inner_first = axes[::-1]
    real = {a.name: a.size for a in axes}
    if prod(real.values()) == processes:
        return real
    small = dict.fromkeys(real, 1)
    # axes of one role: the innermost first, because it shards and an outer one replicates
    ranked = [a.name for a in sorted(inner_first, key=lambda a: _FIRST.index(a.role))]
    wide = [name for name in ranked if real[name] > 1]
    left = processes
    for factor in _factors(processes):
        if not wide:
            break
        name = min(wide, key=lambda n: small[n])
        small[name] *= factor
        left //= factor
    if left > 1 and small:  # all axes have one rank: the first gets all processes
        small[ranked[0]] *= left
    return small


def not_reached(real: Lowered, small: Lowered) -> tuple[str, ...]:
    """What the small run does not cover: axes of one rank, and lines of the plan."""
    there = {op.place for op in small.ops}
    lines = dict.fromkeys(op.place for op in real.ops if op.place not in there)
    alone = {a.name for a in small.axes if a.size == 1}
    axes = [f"{a.name} = {a.size}" for a in real.axes if a.size > 1 and a.name in alone]
    return (*axes, *lines)


def _factors(number: int) -> list[int]:
    """The prime factors, largest first."""
    out = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            out.append(factor)
            number //= factor
        factor += 1
    return sorted(out, reverse=True)
