"""The meshes and stages of a few ranks that stand for those of the real plan."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from planc.elaborate.expert_axes import legal_sizes
from planc.ir.nodes import Mesh, Plan
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered, MeshAxis

RANKS = 2
"""The size of a simulated axis in the first run: errors on 8 ranks show on 2, and heads stay
divisible."""

_FIRST = (AxisRole.TENSOR, AxisRole.DATA, AxisRole.EXPERT, AxisRole.SEQUENCE, AxisRole.STAGE)
"""The order in which axes get processes, if there are not enough."""


MOST = 8
"""The most ranks that are simulated at once."""


def fewest(size: int) -> int:
    """The ranks that stand for those of an axis: 2, or 3 if it has that many, or its only one."""
    return min(size, 3 if size == 3 else RANKS)


def longer(size: int) -> int:
    """The second number of ranks for an axis of more than 3: 4, or 3 if only that divides it."""
    return 3 if size % 4 and size % 3 == 0 else 4


def passes_on(plan: Plan) -> Collection[str]:
    """The axis of stages between whose first and last ones others pass on values beside hidden
    states, or hold parameters of several stages; none where 2 ranks have such stages too.
    """
    op = plan.pipeline.op if plan.pipeline else None
    if op is None or not (op.given or op.states or op.copies):
        return ()
    return (op.axis,) if plan.mesh.size(op.axis) == op.stages > RANKS else ()


def pairs(plan: Plan) -> Collection[str]:
    """The axes with a Ulysses all-to-all among some ranks, and keys and values among others."""
    return {op.axis for op in plan.exchanges if 1 < op.ulysses < plan.mesh.size(op.axis)}


def simulated_sizes(
    axes: Iterable[MeshAxis],
    split: Collection[str],
    passing: Collection[str] = (),
    paired: Collection[str] = (),
) -> Iterator[dict[str, int]]:
    """The small meshes on which layout flow simulates a plan; none if every axis has one rank.

    First every axis of more than one rank with 2 ranks, or 3 if it has that many. Then, without
    data axes, each longer tensor axis (`split`) in turn with 4 ranks or 3, since 2 ranks cannot
    tell a swap from a reversal, or 1/n from 1/2; the others stay, if `MOST` ranks suffice, or have
    one. An axis of `passing` (`passes_on`) that had 2 ranks has 3, alone; one of `paired` (`pairs`)
    has 4 at first.
    """
    axes = tuple(axes)
    first = {a.name: 2 * RANKS if a.name in paired else fewest(a.size) for a in axes}
    for axis in sorted(axes, key=lambda a: a.role is AxisRole.STAGE):
        # the outermost first: an axis that replicates
        if prod(first.values()) > MOST and axis.name not in split:
            first[axis.name] = 1
    if prod(first.values()) == 1:
        return
    yield first
    alone = dict.fromkeys(first, 1)
    tensor = {name: size if name in split else 1 for name, size in first.items()}
    for axis in axes:
        if axis.name in split and axis.size > 3:
            second = {axis.name: longer(axis.size)}
            both = {**tensor, **second}
            yield both if prod(both.values()) <= MOST else {**alone, **second}
    yield from ({**alone, name: 3} for name in passing if first[name] != 3)


def small_sizes(axes: Iterable[MeshAxis], processes: int) -> dict[str, int]:
    """The size of each axis on a few processes.

    Axes of more than one rank keep more than one while there are processes left; the remaining
    factors are distributed in turn. A mesh that already fits is unchanged.

    Args:
        axes: the axes of the original mesh.
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


def with_experts(sizes: dict[str, int], mesh: Mesh) -> dict[str, int]:
    """The sizes of a small mesh, with the number of ranks that divide experts.

    All of the ranks do where all do in the real mesh, and where no axis of data is left that would
    reduce gradients over the others. Else at most half of them, so that ranks with equal experts
    remain; the outermost axis is widened where `ep` cuts it in two and that fits in `MOST`.
    """
    experts = mesh.experts
    if experts is None:
        return sizes
    data = [a.name for a in mesh.of_role(AxisRole.DATA) if a.name in experts.axes]
    inner = mesh.size(*experts.axes) // max(1, mesh.size(*data))
    if experts.ranks.size > inner and experts.rest.size > 1:
        for name in data:
            if (
                sizes[name] == RANKS
                and mesh.size(name) % 4 == 0
                and 2 * prod(sizes.values()) <= MOST
            ):
                sizes = {**sizes, name: 2 * RANKS}
    expert_sizes = [sizes[name] for name in experts.axes]
    # prefer two ranks with different experts to two with equal ones
    alone = experts.rest.size == 1 or prod(expert_sizes) < 2 * RANKS
    alone = alone or all(sizes[name] == 1 for name in data)
    most = prod(expert_sizes) if alone else min(experts.ranks.size, max(1, prod(expert_sizes) // 2))
    ranks = max(n for n in legal_sizes(expert_sizes) if n <= most)
    return {**sizes, experts.ranks.name: ranks}


def for_schedule_file(sizes: dict[str, int], plan: Plan) -> dict[str, int]:
    """The sizes of a small mesh on which a schedule file runs: all ranks of the pipeline axis.

    Other axes get one rank if all together are too many.
    """
    op = plan.pipeline.op if plan.pipeline else None
    if op is None or not op.rank_passes or plan.mesh.size(op.axis) > MOST or sizes[op.axis] == 1:
        return sizes
    sizes = {**sizes, op.axis: plan.mesh.size(op.axis)}
    alone = {name: n if name == op.axis else 1 for name, n in sizes.items()}
    return sizes if prod(sizes.values()) <= MOST else alone


def not_reached(real: Lowered, small: Lowered) -> tuple[str, ...]:
    """Axes of one rank and lines of the plan that the small run does not cover."""
    there = {op.place for op in small.ops}
    lines = dict.fromkeys(op.place for op in real.ops if op.place not in there)
    alone = {a.name for a in small.axes if a.size == 1}
    axes = [f"{a.name} = {a.size}" for a in real.axes if a.size > 1 and a.name in alone]
    return (*axes, *lines)


def _factors(number: int) -> list[int]:
    out = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            out.append(factor)
            number //= factor
        factor += 1
    return sorted(out, reverse=True)


def with_stages(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """The plan with as many stages as the ranks of a small mesh have.

    A rank keeps its number of stages. Where the mesh has one rank along the axis, there is no
    pipeline.

    Args:
        plan: for the real model.
        sizes: of the small mesh, by axis.
    """
    if plan.pipeline is None:
        return plan
    op = plan.pipeline.op
    ranks = sizes[op.axis]
    if ranks == 1:
        return replace(plan, pipeline=None)
    count = ranks * (op.stages // plan.mesh.size(op.axis))
    cut = tuple(op.bounds[i * op.stages // count] for i in range(count + 1))
    return replace(plan, pipeline=replace(plan.pipeline, op=replace(op, bounds=cut)))
