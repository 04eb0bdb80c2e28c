"""A run of many ranks -> one of a few processes that does the same things."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.plan.ir import Axis

_FIRST = (
    AxisRole.TENSOR,
    AxisRole.DATA,
    AxisRole.EXPERT,
    AxisRole.SEQUENCE,
    AxisRole.STAGE,
)
"""Which axes get the processes, where there are not enough for all."""


def small_sizes(axes: Iterable[Axis], processes: int) -> dict[str, int]:
    """The size of each axis on a few processes.

    An axis of more than one rank keeps more than one as long as there are processes; what is left
    goes to them in turn. A mesh that fits as it is stays.

    Args:
        axes: of the real mesh.
        processes: how many there are.
    """
    axes = tuple(axes)
    inner_first = axes[::-1]
    real = {a.name: a.size for a in axes}
    if prod(real.values()) == processes:
        return real
    small = dict.fromkeys(real, 1)
    # of one role the innermost axis first: it shards, where one around it replicates
    ranked = [a.name for a in sorted(inner_first, key=lambda a: _FIRST.index(a.role))]
    wide = [name for name in ranked if real[name] > 1]
    left = processes
    for factor in _factors(processes):
        if not wide:
            break
        name = min(wide, key=lambda n: small[n])
        small[name] *= factor
        left //= factor
    if left > 1 and small:  # all axes have one rank: the first takes what there is
        small[ranked[0]] *= left
    return small


def settings(given: Iterable[str], axes: dict[str, int]) -> tuple[str, ...]:
    """`--set` for the small run: its own axes, and the user's options."""
    kept = [text for text in given if text.partition("=")[0].strip() not in axes]
    return (*kept, *(f"{name}={size}" for name, size in axes.items()))


def not_reached(real: Lowered, small: Lowered) -> tuple[str, ...]:
    """What of the real run the small one does not do: lines of the plan, and axes."""
    there = {op.place for op in small.ops}
    lines = dict.fromkeys(op.place for op in real.ops if op.place not in there)
    alone = {a.name for a in small.axes if a.size == 1}
    axes = [f"{a.name} = {a.size}" for a in real.axes if a.size > 1 and a.name in alone]
    return (*axes, *lines)


def _factors(number: int) -> list[int]:
    """Its prime factors, the large ones first."""
    out = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            out.append(factor)
            number //= factor
        factor += 1
    return sorted(out, reverse=True)
