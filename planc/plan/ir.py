"""The IR: what a plan means for one model on one mesh.

Selectors are expanded to module sets, axes are sized, expressions folded, conditions resolved, and
every node carries the span that it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from planc.model.facts import Modules, Parameter
from planc.ops.aten_operators import Save
from planc.ops.base import AxisRole
from planc.ops.styles import Style
from planc.source import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    origin: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis(Meaning):
    """A mesh axis. `inferred` where its size was `auto`."""

    name: str
    size: int
    role: AxisRole = AxisRole.DATA
    inferred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(Meaning):
    """The device mesh, axes outermost first."""

    axes: tuple[Axis, ...]

    @property
    def world_size(self) -> int:
        return prod(a.size for a in self.axes)

    def axis(self, name: str) -> Axis | None:
        return next((a for a in self.axes if a.name == name), None)

    def of_role(self, role: AxisRole) -> tuple[Axis, ...]:
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
class Load(Meaning):
    """The load section.

    Args:
        meta: the model is built on the meta device, without memory.
        weights: how they arrive: `slices`, `rank0` or `checkpoint`; None where a call says it.
        dtype: torch's name of the type that parameters are kept in, None for the model's own.
        islands: whether those that the model says must stay in float32 stay there.
        fp32: the parameters that the cast leaves in another dtype, by module and name.
        done: whether the model's facts have these dtypes already, as they do with adapters.
    """

    meta: bool = False
    weights: str | None = None
    dtype: str | None = None
    islands: bool = True
    fp32: tuple[Modules, ...] = ()
    done: bool = False

    def kept(self, parameter: Parameter) -> str:
        """The type that a parameter is kept in."""
        if self.dtype is None or self.done:
            return parameter.dtype
        return (parameter if self.islands else replace(parameter, keep_in_fp32="")).cast(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRule(Meaning):
    """Activations of these modules are computed again in backward.

    Args:
        save: what is kept all the same; empty where all is computed again.
        offload: what is kept, the modules' inputs among it, waits on the CPU.
        pin: in pinned memory, where the device has any.
        preserve_rng: random numbers are drawn the same again.
        early_stop: recomputing ends with the last tensor that backward needs.
    """

    modules: Modules
    save: tuple[Save, ...] = ()
    offload: bool = False
    pin: bool = True
    preserve_rng: bool = True
    early_stop: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRule(Meaning):
    modules: Modules
    fullgraph: bool = False


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
    said: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def root(self) -> bool:
        return self.members[0].path == ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Meaning):
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
class Training(Meaning):
    """Whether the parameters below these modules take gradients; the innermost word holds."""

    modules: Modules
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Meaning):
    """How many entries of a list of units are gathered ahead; 0 leaves it to FSDP."""

    forward: int
    backward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload(Meaning):
    """Shards, gradients and optimizer state live in host memory, pinned or not."""

    pin: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Divide(Meaning):
    """The number that summed gradients are divided by, instead of how many ranks add to them."""

    factor: int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron(Meaning):
    """What `backend = megatron` and its lines say; the words are megatron_fsdp's own.

    Args:
        strategy: `zero_dp_strategy`: what is sharded.
        outer: `outer_dp_sharding_strategy`: what the replicate axes share.
        main_params: the type of the weights that the optimizer works on, None for those of the
            model themselves.
        main_grads: the type that gradients add up in, None for the parameters' own.
        grad_comm: the type that they travel in, None for that of `main_grads`.
        options: further keywords of `fully_shard_model`, in its order.
        lines: where each name was said.
    """

    strategy: str = "optim_grads_params"
    outer: str = "no_shard"
    main_params: str | None = "float32"
    main_grads: str | None = None
    grad_comm: str | None = None
    options: tuple[tuple[str, bool], ...] = ()
    lines: Mapping[str, Span] = field(default_factory=dict, compare=False, repr=False)


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
        megatron: what the section says of Megatron-FSDP, None where torch's own does it.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    precision: Precision | None
    units: tuple[Unit, ...]
    ignored: tuple[Ignored, ...] = ()
    prefetch: Prefetch | None = None
    offload: Offload | None = None
    divide: Divide | None = None
    spreads: tuple[Spread, ...] = ()
    megatron: Megatron | None = None

    @property
    def parts(self) -> tuple[Unit | Spread, ...]:
        """All that says how parameters lie."""
        return (*self.units, *self.spreads)

    def axes(self, unit: Unit | Spread) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that a unit is split over, and those that it is copied over.

        Together they are all of the section's, so that every gradient is averaged over the same
        ranks, whatever mesh a unit lies on.
        """
        if unit.shard is None:
            return self.shard, self.replicate
        rest = (*self.replicate, *self.shard)
        return unit.shard, tuple(a for a in rest if a not in unit.shard)

    def beyond(self, unit: Unit | Spread) -> tuple[str, ...]:
        """The axes of a unit that the section lacks: their ranks have the same gradients."""
        own = (*self.replicate, *self.shard)
        return tuple(a for a in unit.shard or () if a not in own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quant:
    """The frozen weight below an adapter in 4 bits, as bitsandbytes has it (QLoRA).

    Args:
        kind: `nf4` or `fp4`.
        storage: the dtype that packed bytes are seen as, None for the one that FSDP gathers in.
        compute: what a product is computed in, None for the dtype of its input.
        double: whether the scales of blocks are quantised too.
        block: the weights that share a scale.
    """

    kind: str = "nf4"
    storage: str | None = None
    compute: str | None = None
    double: bool = False
    block: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRule(Meaning):
    """LoRA on a set of modules: W x + alpha / rank * B A x, as peft has it.

    Args:
        rank: the number of rows of A.
        alpha: what the adapter's output is scaled by, over the rank.
        dropout: the share of A's inputs that training drops.
        dtype: of A and B, a torch dtype's name; None for that of the layer.
        init: `default` (B is 0), `gaussian`, or `random` (A and B).
        quant: how the layer's own weight is kept, None where that stays as it is.
    """

    modules: Modules
    rank: int
    alpha: float
    dropout: float = 0.0
    dtype: str | None = None
    init: str = "default"
    quant: Quant | None = None


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
        broken: sections with a finding of their own, so that nothing is concluded from what they
            lack.
    """

    name: str
    families: tuple[str, ...]
    options: Mapping[str, object]
    mesh: Mesh
    load: Load | None = None
    tensor: tuple[TensorRule, ...] = ()
    checkpoint: tuple[CheckpointRule, ...] = ()
    compile: tuple[CompileRule, ...] = ()
    train: tuple[Training, ...] = ()
    fsdp: Fsdp | None = None
    adapters: Adapters | None = None
    broken: frozenset[str] = frozenset()

    def dtype(self, parameter: Parameter) -> str:
        """The type that a parameter is kept in: its own, or what the load section says."""
        return parameter.dtype if self.load is None else self.load.kept(parameter)
