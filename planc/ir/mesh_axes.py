"""The roles of mesh axes, and the axes derived from others, by the names of training systems.

No other module compares the name of an axis with a string. A product of axes has a name of its own
in torchtitan and in NeMo AutoModel, and a plan may use that name wherever several axes are allowed.
"""

from collections.abc import Collection, Iterable

from planc.ops.base import AxisRole

DATA = "dp"
SHARD = "dp_shard"  # the axis that is `auto` in most plans
DERIVED = {
    DATA: ("dp_replicate", "dp_shard"),  # ranks that read different data
    "dp_shard_cp": ("dp_shard", "cp"),  # ranks that FSDP shards parameters over
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),  # ranks that a loss is averaged over
    # FSDP shards experts over the tensor axis too, because no style does. With `ep` expert-parallel
    # ranks, it is the rest of these axes: `expert_mesh`.
    "ep_shard": ("dp_shard", "cp", "tp"),
}
STAGES = "pp"
TENSOR = "tp"
COPIES = "dp_replicate"
CONTEXT = "cp"
EXPERTS = "ep"
"""No axis of the product: the ranks that divide experts are some of those along `EXPERT_AXES`."""
EXPERT_REST = "ep_shard"
EXPERT_AXES = DERIVED[EXPERT_REST]
EXPERT_TENSOR = "etp"
"""The ranks that split each divided expert: 1, or all of the last of `EXPERT_AXES`."""

ENGINE_SIZES = (TENSOR, DATA, EXPERTS, "fp8", "dtype")
"""The sizes of a serving engine, which `--set` takes for a plan of one."""

LOADED = ("dp_replicate", "dp_shard", "tp")
"""The axes that accelerate's data loaders know: ranks along `tp` read the same rows."""

_ROLES = {STAGES: AxisRole.STAGE, CONTEXT: AxisRole.SEQUENCE, EXPERTS: AxisRole.EXPERT}
"""The roles that follow from the name of an axis; the names are torchtitan's."""


def role_of(
    name: str, *, tensor: Collection[str], data: Collection[str], context: Collection[str] = ()
) -> AxisRole:
    """The role of an axis, by its name or by the kinds of section that name it."""
    if name in _ROLES:
        return _ROLES[name]
    if name in tensor:
        return AxisRole.TENSOR
    if name in context:
        return AxisRole.SEQUENCE
    return AxisRole.TENSOR if name == "tp" and name not in data else AxisRole.DATA


def axes_of(name: str, mesh: Collection[str]) -> tuple[str, ...]:
    """The mesh axes of a name, outermost first: an axis, else a derived axis, without those that
    the mesh lacks; empty for an unknown name.
    """
    if name in mesh:
        return (name,)
    return tuple(axis for axis in DERIVED.get(name, ()) if axis in mesh)


def expand_axes(names: Iterable[str], mesh: Collection[str]) -> tuple[str, ...]:
    """Names as axes of a mesh; an unknown name is kept, for a finding."""
    return tuple(axis for name in names for axis in axes_of(name, mesh) or (name,))


def valid_axes(mesh: Collection[str]) -> tuple[str, ...]:
    """The names that are valid in a mesh: its axes, then the derived axes."""
    return (*mesh, *(n for n in DERIVED if n not in mesh and axes_of(n, mesh)))
