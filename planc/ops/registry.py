"""The lowered plan: ordered operations as plain data, one kind per torch call.

This is the artefact: what `apply` runs, what `lower` prints, what `diff` compares and what the
emitted Python spells out. It names modules by path and holds no torch object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from planc.model.facts import Modules
from planc.ops.aten_operators import Save
from planc.ops.base import Draw, Op
from planc.ops.peft_pattern import pattern_of
from planc.ops.styles import Custom, Style

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A parameter's shape before and after an operation, on the rank that holds most."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure(Op):
    """`model.config.<name> = value`, where training needs it; `reason` says why."""

    name: str
    value: bool
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Op):
    """Where weights begin and how they arrive: what is cast before all else, and `Run.load`.

    Args:
        meta: the model must be on the meta device.
        weights: what `Run.load` does with a folder: `slices`, each rank reads its own; `rank0`, it
            reads and sends; `checkpoint`, of torch.distributed.checkpoint. None: the call says it.
        dtype: torch's name of the type that parameters are cast to, None for their own.
        fp32: parameters that are cast to float32 instead; the last part of a path is a
            parameter's name.
    """

    meta: bool = False
    weights: str | None = None
    dtype: str | None = None
    fp32: tuple[Modules, ...] = ()

    @property
    def pattern(self) -> str:
        """The regular expression of the names in `fp32`, and no others."""
        return pattern_of(self.fp32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelize(Op):
    """`parallelize_module(module, mesh[axis], style)` for each module."""

    modules: Modules
    axis: str
    style: Style
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie(Op):
    """`parallelize_module` makes new parameters, so a tie is made again: parameter = source.

    Both are torch names of parameters, such as `lm_head.weight`.
    """

    parameter: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(Op):
    """`module.requires_grad_(trainable)` for each module; later ones may be inside earlier ones."""

    modules: Modules
    trainable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapt(Op):
    """peft's `inject_adapter_in_model` with one `LoraConfig`; all but adapters is frozen.

    Args:
        members: the layers of one rule.
        rank, alpha, dropout: the configuration's `r`, `lora_alpha` and `lora_dropout`.
        dtype: what A and B are cast to, None where they keep that of their layer.
        init: `default`, `gaussian` or `random`, peft's `init_lora_weights`.
        seed: of their first values, so that every rank has the same.
    """

    members: tuple[Modules, ...]
    rank: int
    alpha: float
    dropout: float = 0.0
    dtype: str | None = None
    init: str = "default"
    seed: int = 0

    @property
    def pattern(self) -> str:
        """The regular expression that peft finds these layers by, and no others."""
        return pattern_of(self.members)

    def names(self) -> Iterator[str]:
        """The torch names of all layers."""
        return (name for members in self.members for name in members.names())


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(Op):
    """bitsandbytes' `quantize_4bit` of each layer's weight, whose bytes become a column.

    Args:
        members: linear layers, as peft calls those that it is around (`base_layer`).
        kind: `nf4` or `fp4`.
        storage: the dtype that the bytes are seen as, a torch dtype's name.
        compute: what a product is computed in, None for the dtype of its input.
        double: whether scales are quantised too.
        block: the weights that share a scale.
    """

    members: tuple[Modules, ...]
    kind: str
    storage: str
    compute: str | None = None
    double: bool = False
    block: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Op):
    """`checkpoint_wrapper` (without reentry) around each module.

    Args:
        save: what is kept in forward (selective checkpointing); empty where nothing is.
        offload: what is kept, and what goes into the modules, waits for backward on the CPU.
        pin: there in pinned memory, where the device is CUDA.
        preserve_rng: `preserve_rng_state`.
        early_stop: `early_stop`.
    """

    modules: Modules
    save: tuple[Save, ...] = ()
    offload: bool = False
    pin: bool = True
    preserve_rng: bool = True
    early_stop: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(Op):
    """`module.compile(fullgraph=...)`."""

    modules: Modules
    fullgraph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Parameters in and below modules that lie otherwise than the rest of their unit."""

    modules: Modules
    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()
    shard_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard(Op):
    """`fully_shard`: one unit per module of `members[0]`, or one for a group.

    Args:
        shard: axes over which parameters are split; several are flattened to one dimension. None
            means torch's composable `replicate`.
        replicate: axes over which they are copied.
        reshard: `reshard_after_forward`.
        param, reduce, output: dtype names of the mixed precision policy, None for none.
        cast_inputs: the policy's `cast_forward_inputs`.
        nbytes: bytes of parameters that one rank keeps of one such unit, at rest.
        gathered: bytes of one such unit while it is gathered (in `param` precision).
        ignored: modules inside whose parameters stay whole and belong to no unit.
        shard_dim: the dim that is split of those parameters that have it, where it divides.
        offload: whether shards live in host memory.
        pin: whether that memory is pinned, where there is a device to copy to.
        spreads: parameters inside that lie otherwise, outer modules before inner.
    """

    members: tuple[Modules, ...]
    group: bool = False
    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()
    reshard: bool | int
    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = True
    nbytes: int = 0
    gathered: int = 0
    ignored: tuple[Modules, ...] = ()
    shard_dim: int = 0
    offload: bool = False
    pin: bool = False
    spreads: tuple[Spread, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronShard(Op):
    """`megatron_fsdp.fully_shard_model` of the whole model, one call.

    Args:
        members: the modules that are units, each by itself; the rest is sharded in no unit.
        classes: theirs, by name: what the call takes.
        shard: axes over which it shards; several are one dimension of its mesh.
        replicate: axes of `dp_outer_dim`.
        strategy, outer: `zero_dp_strategy` and `outer_dp_sharding_strategy`.
        main_params, main_grads, grad_comm: dtype names of its mixed precision policy.
        summed: `calculate_per_token_loss`: gradients are added up and not averaged.
        experts: whether there are parameters that it takes for experts by their names, for which
            it is given the same mesh again.
        options: further keywords that are not at their defaults.
        nbytes: bytes that one rank keeps at rest, the optimizer's weights among them.
        gathered: bytes of the largest unit while it is gathered.
    """

    members: tuple[Modules, ...]
    classes: tuple[str, ...]
    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()
    strategy: str = "optim_grads_params"
    outer: str = "no_shard"
    main_params: str | None = "float32"
    main_grads: str | None = None
    grad_comm: str | None = None
    summed: bool = False
    experts: bool = False
    options: tuple[tuple[str, bool], ...] = ()
    nbytes: int = 0
    gathered: int = 0

    def units(self) -> Iterator[FullyShard]:
        """Each set of units, and the root around them, as torch's own FSDP would have it."""
        whole = self.strategy == "optim_grads_params"
        for member in (*self.members, Modules((), self.members[0].module)):
            yield FullyShard(
                members=(member,),
                shard=self.shard if whole else (),
                replicate=self.replicate if whole else (*self.replicate, *self.shard),
                reshard=whole and member.path != (),
                reduce=self.grad_comm or self.main_grads,
                place=self.place,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divide(Op):
    """`set_gradient_divide_factor` of every unit, or of some.

    Args:
        factor: what summed gradients are divided by.
        units: those that more ranks add up, after all others; empty for every unit.
    """

    factor: int | float
    units: tuple[Modules, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Op):
    """`set_modules_to_forward_prefetch` and `..._backward_prefetch` along a list of units.

    Args:
        units: sets with the list's indices at one place of their paths; of one entry they run in
            this order, outer ones before those inside them.
        forward, backward: how many entries ahead are gathered; 0 leaves it to FSDP.
    """

    units: tuple[Modules, ...]
    forward: int = 0
    backward: int = 0

    @property
    def returning(self) -> tuple[Modules, ...]:
        """The units of an entry in the order of the backward pass: the last first, but a unit
        before those inside it, as its hook is on its output."""
        result: list[Modules] = []
        for modules in self.units:
            around = [i for i, outer in enumerate(result) if modules.within(outer)]
            result.insert(around[-1] + 1 if around else 0, modules)
        return tuple(result)


AnyOp = (
    Configure
    | Load
    | Adapt
    | Parallelize
    | Tie
    | Freeze
    | Quantize
    | Checkpoint
    | Compile
    | FullyShard
    | MegatronShard
    | Divide
    | Draw
    | Prefetch
)


def units_of(op: Op) -> tuple[FullyShard, ...]:
    """The units that an operation makes."""
    if isinstance(op, MegatronShard):
        return tuple(op.units())
    return (op,) if isinstance(op, FullyShard) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    name: str
    size: int
    inferred: bool = False
    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A plan for one model on one mesh, ready to run.

    Args:
        plan: the plan's name.
        model: the model's class.
        family: its `model_type`.
        layers: the length of its longest list of blocks.
        axes: the mesh, outermost first.
        data: the axes over which the data differs; sampler rank and size follow from them.
        ops: in the order in which `apply` runs them.
        parameters: bytes of parameters that one rank holds at rest.
        gathered: bytes of the largest unit while it is gathered.
    """

    plan: str
    model: str
    family: str
    layers: int
    axes: tuple[MeshAxis, ...]
    data: tuple[str, ...]
    ops: tuple[AnyOp, ...]
    parameters: int = 0
    gathered: int = 0

    @property
    def code(self) -> tuple[str, ...]:
        """The `package.module:Class` of each style of the plan's own: code that apply imports."""
        styles = (op.style for op in self.ops if isinstance(op, Parallelize))
        return tuple(dict.fromkeys(s.path for s in styles if isinstance(s, Custom)))

    @property
    def world_size(self) -> int:
        size = 1
        for axis in self.axes:
            size *= axis.size
        return size

    @property
    def averaged(self) -> tuple[str, ...]:
        """The axes over which gradients are averaged: those of the data, and of the sequence."""
        units = [op for op in self.ops if isinstance(op, FullyShard | MegatronShard)]
        names = {name for op in units for name in (*op.shard, *op.replicate)}
        # a unit may lie on tensor ranks too, which have the same gradients
        names &= {*self.data, "cp"}
        return tuple(a.name for a in self.axes if a.name in names)

    def axis_size(self, *names: str) -> int:
        size = 1
        for axis in self.axes:
            if axis.name in names:
                size *= axis.size
        return size
