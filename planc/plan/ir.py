"""The IR: what a plan means for one model on one mesh.

Selectors are expanded to module sets, axes are sized, expressions folded, conditions resolved, and
every node carries the span that it comes from. What one line decides whole is an operation
already, which lowering only orders, merges and completes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from planc.model.facts import Modules, Parameter
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import AxisRole
from planc.ops.compile import Compile
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, Prefetch
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import MeshAxis
from planc.ops.megatron_fsdp import MegatronShard
from planc.ops.quantization import Quantize
from planc.ops.styles import Style
from planc.source import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    origin: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(Meaning):
    """The device mesh, axes outermost first."""

    axes: tuple[MeshAxis, ...]

    @property
    def world_size(self) -> int:
        return prod(a.size for a in self.axes)

    def axis(self, name: str) -> MeshAxis | None:
        return next((a for a in self.axes if a.name == name), None)

    def of_role(self, role: AxisRole) -> tuple[MeshAxis, ...]:
        return tuple(a for a in self.axes if a.role is role)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    def size(self, *names: str) -> int:
        """The number of ranks along the named axes; an axis that the mesh lacks counts as 1."""
        return prod(a.size for a in self.axes if a.name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule(Meaning):
    """A style on a set of modules, over the axis of its section; rules over other axes may be on
    the same modules."""

    modules: Modules
    axis: str
    style: Style


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(Meaning):
    """FSDP's `MixedPrecisionPolicy`: torch dtype names, None for the parameter's own."""

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit(Meaning):
    """One `fully_shard` call for each module of `members[0]`, or one for all of a group.

    Args:
        members: one set of modules; more than one only in a group.
        group: all modules of all members are one unit.
        reshard: after forward: True, False, or the number of ranks that keep a shard.
        precision: this unit's own, or None for the section's.
        shard: the axes of its own, of the section's and of tensor parallelism's, or None for all
            of the section's; over the rest of these it is copied.
        shard_dim: the dim that is split of those parameters that have it, where it divides.
        said: the arguments of its line, which defaults do not tell.
    """

    members: tuple[Modules, ...]
    group: bool = False
    reshard: bool | int = True
    precision: Precision | None = None
    shard: tuple[str, ...] | None = None
    shard_dim: int = 0
    explicit: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def root(self) -> bool:
        return self.members[0].path == ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadRule(Meaning):
    """`SELECTOR : spread(...)`: what is in a unit, and lies otherwise than the rest of it.

    Args:
        modules: all parameters of theirs and below, but those of units inside.
        shard, shard_dim: as of a unit.
    """

    modules: Modules
    shard: tuple[str, ...] | None = None
    shard_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored(Meaning):
    """`ignore SELECTOR`: all parameters below these modules stay whole, in no unit."""

    modules: Modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload(Meaning):
    """Shards, gradients and optimizer state live in host memory, pinned or not."""

    pin: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp(Meaning):
    """The fsdp section, or a replicate section, which has no axes to shard over.

    Args:
        shard: the axes over which parameters are split.
        replicate: the axes over which they are copied (HSDP).
        precision: what the section's `precision(...)` says.
        units: in the plan's order; lowering puts inner before outer and the root last.
        ignored: what no unit takes.
        spreads: what lies otherwise than the rest of its unit.
        prefetch: the operation without its units.
        megatron: the operation without its units and axes, None where torch's own FSDP does it.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    precision: Precision | None
    units: tuple[Unit, ...]
    ignored: tuple[Ignored, ...] = ()
    prefetch: Prefetch | None = None
    offload: Offload | None = None
    divide: Divide | None = None
    spreads: tuple[SpreadRule, ...] = ()
    megatron: MegatronShard | None = None

    @property
    def parts(self) -> tuple[Unit | SpreadRule, ...]:
        """All that says how parameters lie."""
        return (*self.units, *self.spreads)

    def axes(self, unit: Unit | SpreadRule) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that a unit is split over, and those that it is copied over.

        Together they are all of the section's, so that every gradient is averaged over the same
        ranks, whatever mesh a unit lies on.
        """
        if unit.shard is None:
            return self.shard, self.replicate
        rest = (*self.replicate, *self.shard)
        return unit.shard, tuple(a for a in rest if a not in unit.shard)

    def extra_axes(self, unit: Unit | SpreadRule) -> tuple[str, ...]:
        """The axes of a unit that the section lacks: their ranks have the same gradients."""
        own = (*self.replicate, *self.shard)
        return tuple(a for a in unit.shard or () if a not in own)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRule(Meaning):
    """LoRA on a set of modules: W x + alpha / rank * B A x, as peft has it.

    Args:
        adapt: the operation of the rule, without its modules.
        quantize: the same where the layer's weight is kept in 4 bits (QLoRA). Its `storage` is
            empty until `adapted` finds what FSDP gathers in.
    """

    modules: Modules
    adapt: Adapt
    quantize: Quantize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters(Meaning):
    """The adapters section: what is trained, while all else is frozen.

    Args:
        own: whether A and B are FSDP units of their own, or belong to the unit around.
        seed: of their first values, which must be the same on every rank.
        units_origin: where `units` is set, None where it is not.
    """

    rules: tuple[AdapterRule, ...]
    own: bool = False
    seed: int = 0
    units_origin: Span | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Meaning):
    """A plan, resolved.

    Args:
        name: the plan's own name.
        families: the `model_type`s it is written for.
        options: the value of every option, after `--set`.
        tensor: what the tensor sections decide; kept at tp = 1 too, where lowering drops it.
        train: what the train sections freeze or let train, outer modules first.
        adapted: whether the model's facts have the adapters, and the dtypes of `load`, already.
        broken: sections with a finding of their own, so that nothing is concluded from what they
            lack.
    """

    name: str
    families: tuple[str, ...]
    options: Mapping[str, object]
    mesh: Mesh
    load: Load | None = None
    tensor: tuple[TensorRule, ...] = ()
    checkpoint: tuple[Checkpoint, ...] = ()
    compile: tuple[Compile, ...] = ()
    train: tuple[Freeze, ...] = ()
    fsdp: Fsdp | None = None
    adapters: Adapters | None = None
    adapted: bool = False
    broken: frozenset[str] = frozenset()

    def dtype(self, parameter: Parameter) -> str:
        """The type that a parameter is kept in: its own, or what the load section says."""
        return parameter.dtype if self.load is None or self.adapted else self.load.kept(parameter)
