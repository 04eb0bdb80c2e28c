"""The ranks that divide experts: a mesh of their own, made of axes of the plan's mesh."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from planc.diagnostics.diagnostic import Label, one_of
from planc.elaborate.program import Program
from planc.ir.mesh_axes import EXPERT_AXES, EXPERT_REST, EXPERTS
from planc.ir.nodes import Mesh
from planc.ops.base import AxisRole
from planc.ops.lowered import ExpertMesh, MeshAxis

_LISTED = 12  # legal sizes that a message lists


def expert_mesh(
    mesh: Mesh, ranks: MeshAxis | None, inside: MeshAxis | None, program: Program
) -> Mesh:
    """Returns the mesh with its expert-parallel ranks, innermost ranks first.

    `dp_shard * cp * tp = ep_shard * ep`, as in torchtitan, and `dp_shard * cp = ep_shard * ep`
    if the ranks of `tp` shard each expert (torchtitan's expert_tensor_parallel_degree, which is
    1 or the tensor degree there too). `ep` is the size of whole inner axes times a divisor of the
    next one, so that ranks of one tensor axis stay together.

    Args:
        mesh: the axes, without `ep`.
        ranks: the expert-parallel ranks; None for one.
        inside: the ranks that shard the weights of each expert; None for one.
    """
    *_, tensor = EXPERT_AXES
    if inside and (ranks is None or inside.size != mesh.size(tensor)):
        _no_split(mesh, ranks, inside, program)
        return mesh
    if ranks is None:
        return mesh
    split = (tensor,) if inside else ()
    axes = [a for a in mesh.axes if a.name in EXPERT_AXES and a.name not in split]
    total = prod(a.size for a in axes)
    fits = sorted(set(legal_sizes([a.size for a in axes])))
    if ranks.size not in fits:
        _illegal(mesh, ranks, axes, fits, program)
        return mesh
    rest = MeshAxis(name=EXPERT_REST, size=total // ranks.size, role=AxisRole.DATA)
    names = tuple(a.name for a in axes)
    return replace(mesh, experts=ExpertMesh(ranks=ranks, rest=rest, axes=names, inside=split))


def _no_split(mesh: Mesh, ranks: MeshAxis | None, inside: MeshAxis, program: Program) -> None:
    """Reports PL550: `ep` is 1, or `etp` is not the size of the tensor axis."""
    program.broken.add("expert")
    *_, tensor = EXPERT_AXES
    if ranks is None:
        message = f"`{inside.name} = {inside.size:,}` needs expert parallelism, and {EXPERTS} is 1"
        hint = f"set `{inside.name} = 1`; styles shard experts without expert parallelism"
    else:
        message = f"`{inside.name} = {inside.size:,}` does not fit this mesh"
        hint = f"{inside.name} can be 1 or the size of {tensor}, {mesh.size(tensor):,}"
    program.sink.error("PL550", message, inside.origin, help=hint)


def legal_sizes(sizes: Sequence[int]) -> Iterator[int]:
    """Yields the sizes that `ep` can have along axes of these sizes, outermost first."""
    inner = 1
    for size in reversed(sizes):
        for divisor in range(1, int(size**0.5) + 1):
            if size % divisor == 0:
                yield inner * divisor
                yield inner * (size // divisor)
        inner *= size


def _illegal(
    mesh: Mesh, ranks: MeshAxis, axes: Sequence[MeshAxis], fits: list[int], program: Program
) -> None:
    program.broken.add("expert")  # the layout of the experts is unknown
    product = " * ".join(f"{a.name} {a.size}" for a in axes) or "no axis"
    shown = one_of([f"{n:,}" for n in fits[:_LISTED]]) + (" or more" * (len(fits) > _LISTED))
    facts = [f"{EXPERTS} is made of {product} = {prod(a.size for a in axes):,} ranks"]
    if mesh.assumed:
        facts.append("no world size is given, so `auto` counts as 1")
    program.sink.error(
        "PL550",
        f"`{EXPERTS} = {ranks.size:,}` does not fit this mesh",
        ranks.origin,
        *(Label(span=a.origin, text=f"{a.name} is {a.size}") for a in axes if a.size > 1),
        facts=facts,
        help=f"use {shown}: `{EXPERTS}` covers whole axes from the innermost one, and a divisor "
        "of the next one",
    )
