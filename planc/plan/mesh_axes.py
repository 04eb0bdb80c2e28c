"""What axes are for, and the axes that follow from those of a mesh, by the names that training
systems give them. No other module compares the name of an axis with a text.

A mesh has what is written in its section. Its product of axes goes by a name of its own in
torchtitan and in NeMo AutoModel, and a plan may use that name wherever several axes may stand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from planc.ops.base import AxisRole

DATA = "dp"
SHARD = "dp_shard"  # the axis that most plans leave the rest of the ranks to
DERIVED = {
    DATA: ("dp_replicate", "dp_shard"),  # ranks that read different data
    "dp_shard_cp": ("dp_shard", "cp"),  # ranks that FSDP splits parameters over
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),  # ranks that a loss is averaged over
    # Experts are split over no tensor axis, so its ranks share them too. (`ep` of these ranks
    # would exchange tokens; without expert parallelism there is 1.)
    "ep_shard": ("dp_shard", "cp", "tp"),
}


_ROLES = {
    "pp": AxisRole.STAGE,
    "cp": AxisRole.SEQUENCE,
    "ep": AxisRole.EXPERT,
}
"""Axes whose name alone says what they are for; the names are torchtitan's."""


def role_of(name: str, *, tensor: Collection[str], data: Collection[str]) -> AxisRole:
    """What the ranks along an axis share out.

    Args:
        name: the axis.
        tensor: axes of tensor sections.
        data: axes of fsdp and replicate sections.
    """
    if name in _ROLES:
        return _ROLES[name]
    if name in tensor:
        return AxisRole.TENSOR
    return AxisRole.TENSOR if name == "tp" and name not in data else AxisRole.DATA


def axes_of(name: str, mesh: Collection[str]) -> tuple[str, ...]:
    """The axes of a mesh that a name stands for, outermost first; none where it names nothing.

    Args:
        name: an axis, which goes before a derived one of its name, or a derived one.
        mesh: the names of the mesh's axes. One that a derived axis has and the mesh lacks counts
            as 1, so it is left out.
    """
    if name in mesh:
        return (name,)
    return tuple(axis for axis in DERIVED.get(name, ()) if axis in mesh)


def expanded(names: Iterable[str], mesh: Collection[str]) -> tuple[str, ...]:
    """Names as axes of a mesh; one that names nothing stays as it is, for a finding."""
    return tuple(axis for name in names for axis in axes_of(name, mesh) or (name,))


def known(mesh: Collection[str]) -> tuple[str, ...]:
    """The names that stand for something in a mesh: its axes, and then what follows from them."""
    return (*mesh, *(n for n in DERIVED if n not in mesh and axes_of(n, mesh)))
