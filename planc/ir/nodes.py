"""The IR: the meaning of a plan for one model on one mesh.

Selectors are expanded to sets of modules, axes have sizes, expressions and conditions are
evaluated, and every node has the span that it comes from. What one line decides completely is an
operation already, which lowering only orders, merges and completes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import lcm, prod
from typing import Any, TypeVar

from planc.diagnostics.source import NOWHERE, Span
from planc.ir.mesh_axes import EXPERT_TENSOR, expand_axes
from planc.model.facts import Facts, Modules, Parameter, Segment
from planc.model.patches import patches_of_class
from planc.model.roles import attention, block_names, roles
from planc.ops.activation_checkpoint import Checkpoint, checkpoints
from planc.ops.backend import Backend
from planc.ops.base import AxisRole
from planc.ops.compressed_weights import CompressedWeights
from planc.ops.context import Attend, ContextParallel
from planc.ops.contract import Split, weight_split
from planc.ops.expert_capacity import PROBS
from planc.ops.expert_parallel import Dispatch
from planc.ops.freeze import Freeze, freezes
from planc.ops.fsdp import Divide, Prefetch
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import ExpertMesh, MeshAxis
from planc.ops.optimizer import Optimize
from planc.ops.phrases import together
from planc.ops.pipeline import Pipeline
from planc.ops.styles import MlaKv, Parts, Style


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    origin: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(Meaning):
    """The device mesh, axes outermost first.

    Args:
        experts: the ranks that divide experts, which are some of those along the axes; None where
            every rank has all experts.
        assumed: whether `auto` counts as 1 because no world size is given.
        left_out: optional axes of one rank; they are no axes here.
    """

    axes: tuple[MeshAxis, ...]
    experts: ExpertMesh | None = None
    assumed: bool = False
    left_out: tuple[str, ...] = ()

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
        of_experts = self.experts.sizes.items() if self.experts else ()
        parts = prod(size for name, size in of_experts if name in names)
        if EXPERT_TENSOR in names and self.experts:
            parts *= self.size(*self.experts.inside)
        return parts * prod(a.size for a in self.axes if a.name in names)

    def ranks_of(self, role: AxisRole) -> int:
        """The number of ranks along the axes of a role."""
        return prod(a.size for a in self.of_role(role))

    def wide(self, names: Iterable[str]) -> tuple[str, ...]:
        """The given axes with more than one rank."""
        return tuple(name for name in names if self.size(name) > 1)

    def expand(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names with those of derived axes replaced by the axes that they consist of."""
        known = (*self.names, *(self.experts.sizes if self.experts else ()))
        return expand_axes(names, known)

    def with_sizes(self, sizes: Mapping[str, int]) -> Mesh:
        """The mesh with other sizes, also of the ranks that divide experts."""
        axes = tuple(replace(a, size=sizes[a.name], inferred=False) for a in self.axes)
        made = replace(self, axes=axes)
        if self.experts is None:
            return made
        ranks = sizes[self.experts.ranks.name]
        rest = made.size(*self.experts.axes) // ranks
        parts = replace(self.experts.ranks, size=ranks), replace(self.experts.rest, size=rest)
        return replace(made, experts=replace(self.experts, ranks=parts[0], rest=parts[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """Why planc adds a rule, or completes the layouts of one.

    Args:
        reason: a sentence after "because".
        weights: the modules whose splits it follows from.
        code: the line of the model's code.
        beside: the modules whose widths are the rest of a linear's output: `mla_kv(rope)` is
            what they leave of it.
    """

    reason: str
    weights: tuple[str, ...] = ()
    code: str = ""
    beside: tuple[tuple[Segment, ...], ...] = ()

    @property
    def text(self) -> str:
        """The reason, the weights and the line, for a person."""
        source = f"follows from {', '.join(together(self.weights))}" if self.weights else ""
        return "; ".join(filter(None, (self.reason, source, self.code)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSetting(Meaning):
    """The setting `sequence` of a tensor section: layouts over its axis are inferred.

    Args:
        wanted: whether hidden states are to be sequence shards; None for `auto`.
    """

    axis: str
    wanted: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule(Meaning):
    """A style on a set of modules over the axis of its section; other axes may have other rules.

    Args:
        modules, axis, style: such as `model.layers[0:32].mlp.o_proj`, `tp`, `rowwise(-> shard(1))`.
        written: the place of the style in its line: of `rowwise` in `down_proj : rowwise`.
        open: whether layouts are inferred: True for `rowwise`, False for `colwise(local = true)`.
        inferred: the reason of the rule, or of its layouts, such as "follows from model.norm"; None
            if its line states all of it.
    """

    modules: Modules
    axis: str
    style: Style
    written: Span = field(default=NOWHERE, compare=False, repr=False)
    open: bool = field(default=False, compare=False)
    inferred: Inferred | None = field(default=None, compare=False)

    def for_model(self, facts: Facts) -> TensorRule:
        """The rule with the numbers of another model, on whose modules it is."""
        if not isinstance(self.style, MlaKv) or self.inferred is None:
            return self
        width = self.modules.module.parameters[0].shape[0]
        rest = (
            facts.module_at(Modules(p, self.modules.module).first_name).module
            for p in self.sibling_paths
        )
        return replace(self, style=MlaKv(rope=width - sum(m.parameters[0].shape[-1] for m in rest)))

    @property
    def sibling_paths(self) -> Iterator[tuple[Segment, ...]]:
        """The paths of the modules beside it, of one of its modules."""
        for inner in self.inferred.beside if self.inferred else ():
            yield (*self.modules.path[:-1], *inner)

    def split(self, parameter: Parameter) -> Split | None:
        """The dim and parts by which the style shards a parameter; None if it is replicated."""
        kind, ndim = self.modules.module.kind, len(parameter.shape)
        return weight_split(self.style, kind, parameter.name, ndim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesSetting(Meaning):
    """The setting `images` of a tensor or a context section.

    Args:
        divided: whether each rank of the axis runs the tower on some of the images (`rows`), or all
            do on all.
        parts: whether its ranks have parts of the rows, and so of the features' gradient.
        times: what this gradient is multiplied by, where FSDP takes the mean over the axis.
    """

    axis: str
    divided: bool
    parts: bool = False
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(Meaning):
    """FSDP's `MixedPrecisionPolicy`: torch dtype names, None for the parameter's dtype."""

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit(Meaning):
    """One `fully_shard` call for each module of `members[0]`, or one for a whole group.

    Args:
        reshard: whether to reshard after forward, or the number of ranks to reshard over.
        precision: the mixed precision of this unit, or None for the section's.
        shard: the axes that shard it, of the section or of tensor parallelism, or None for all
            shard axes of the section. It is replicated over the section's other axes.
        shard_dim: the dim that FSDP shards, if a parameter has it and it is divisible; else 0.
        explicit: the arguments that the line states: their texts by name.
    """

    members: tuple[Modules, ...]
    group: bool = False
    reshard: bool | int = True
    precision: Precision | None = None
    shard: tuple[str, ...] | None = None
    shard_dim: int = 0
    explicit: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def root(self) -> bool:
        return self.members[0].path == ()

    def with_members(self, place: Callable[[Modules, Span], Iterable[Modules]]) -> Iterator[Unit]:
        """Yields the unit with other members: one unit per member, or one for a group."""
        members = tuple(m for one in self.members for m in place(one, self.origin))
        if members and self.group:
            yield replace(self, members=members)
        elif not self.group:
            yield from (replace(self, members=(member,)) for member in members)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadRule(Meaning):
    """`SELECTOR : spread(...)`: parameters of an FSDP unit that are sharded over another mesh or
    dim.

    Args:
        modules: all parameters in them and in their submodules, except in nested units.
        shard, shard_dim: as of a unit.
    """

    modules: Modules
    shard: tuple[str, ...] | None = None
    shard_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored(Meaning):
    """`ignore SELECTOR`: all parameters in these modules are replicated and in no unit."""

    modules: Modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload(Meaning):
    """Shards, gradients and optimizer state are in CPU memory, pinned or not."""

    pin: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp(Meaning):
    """The fsdp section (replicated axes: HSDP), or a replicate section, which has no shard axes.

    Args:
        units: in the plan's order; lowering sorts them topologically.
        ignored, spreads: what is in no unit, and what is sharded otherwise than its unit.
        prefetch: the operation without its units.
        backend: the operation without its units and axes, None for FSDP2.
        experts: how ranks divide experts, None where none do.
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
    backend: Backend | None = None
    experts: ExpertMesh | None = None

    @property
    def parts(self) -> tuple[Unit | SpreadRule, ...]:
        """All nodes that place parameters."""
        return (*self.units, *self.spreads)

    def axes(self, unit: Unit | SpreadRule) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that a unit is sharded over, and those that it is replicated over.

        Together they are all axes of the section, so that every gradient is averaged over the
        same ranks, whatever the unit's mesh.
        """
        if unit.shard is None:
            return self.shard, self.replicate
        rest, experts = (*self.replicate, *self.shard), self.experts
        made = dict.fromkeys(experts.sizes, experts.axes) if experts else {}
        there = {a for name in unit.shard for a in made.get(name, (name,))}
        return unit.shard, tuple(a for a in rest if a not in there)

    def policy(self, unit: Unit | None) -> Precision | None:
        """The precision of a unit, its own or the section's; None for no unit."""
        return (unit.precision or self.precision) if unit else None

    def extra_axes(self, unit: Unit | SpreadRule) -> tuple[str, ...]:
        """The axes of a unit that the section lacks: their ranks have equal gradients."""
        own = (*self.replicate, *self.shard, *(self.experts.sizes if self.experts else ()))
        return tuple(a for a in unit.shard or () if a not in own)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRule(Meaning):
    """LoRA on a set of modules: W x + alpha / rank * B A x, as in peft. On fused experts it applies
    to the weights that it names, or to all.

    `compressed` stores the layers' own weights in fewer bits (QLoRA); None leaves them.
    """

    modules: Modules
    adapt: Adapt
    compressed: CompressedWeights | None = None

    @property
    def wraps(self) -> bool:
        """Whether peft wraps the modules; to fused experts it adds parameters instead."""
        return not self.adapt.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters(Meaning):
    """The adapters section; all other parameters are frozen.

    Args:
        own: whether A and B are separate FSDP units.
        seed: the seed of initial values.
        units_origin: the line of the setting `units`.
    """

    rules: tuple[AdapterRule, ...]
    own: bool = False
    seed: int = 0
    units_origin: Span | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualTimes(Meaning):
    """The line by which blocks are cut into stages of equal time.

    Args:
        rows, seq: the shape of a microbatch of a data-parallel rank: sequences, and tokens of each
            before context parallelism shards them.
    """

    rows: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes(EqualTimes):
    """The line, and the stages that `planc.tools.estimate.stages` has cut by it.

    Args:
        seconds: the time of each stage for a microbatch, forward and backward.
    """

    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRule(Meaning):
    """The rule that cuts blocks into stages.

    Args:
        times: the microbatch and times, if stages are cut by time.
        before: modules without parameters whose results only the first block's hidden states
            contain, so that no other stage needs them.
    """

    op: Pipeline
    times: EqualTimes | None = None
    before: tuple[Modules, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRule(Meaning):
    """Fused experts under expert parallelism, with their dispatch in a number of chunks.

    `capacity`: the capacity of an expert in a row over its mean number of tokens; None without a
    limit. `drop`: the choice of the tokens that are dropped. Both hold on one rank too.
    """

    modules: Modules
    dispatch: Dispatch
    chunks: int = 1
    capacity: float | None = None
    drop: str = PROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRule(Meaning):
    """The rule that steps the parameters inside modules, unless a rule is on a module further in.

    Args:
        op: on the whole model; Muon's units are decided by the model's code.
        per, parts: what Muon orthogonalizes; None and 1 follow the model's code.
        interleaved: whether the features of `parts` alternate.
        anyway: whether Muon accepts embeddings, heads and routers, and parts unlike the code's.
    """

    modules: Modules
    op: Optimize
    per: str | None = None
    parts: Parts = 1
    interleaved: bool = False
    anyway: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRule(Meaning):
    """An axis whose ranks hold sequence shards; `op` is None if the script slices sequences."""

    axis: str
    op: ContextParallel | None = None
    images: ImagesSetting | None = None

    def for_model(self, facts: Facts) -> ContextRule:
        """The rule with the modules of a model between which each rank has its tokens."""
        if self.op is None:
            return self
        if (known := patches_of_class(facts)) is not None:
            seen, blocks = known.attention(facts), known.ends(facts)
            op = replace(self.op, blocks=blocks, seeing=seen, patches=known.place)
            return replace(self, op=op)
        if self.op.attention != "gather":
            return self
        names, heads, seeing = block_names(facts), roles(facts).head, attention(facts)
        ends = tuple(names[:1] + names[-1:])
        return replace(self, op=replace(self.op, blocks=ends, heads=heads, seeing=seeing))


Ruled = TypeVar(
    "Ruled",
    TensorRule,
    ExpertRule,
    AdapterRule,
    Ignored,
    SpreadRule,
    OptimizerRule,
)
"""A node that one line decides for its `modules`."""

_RULES = ("tensor", "attention", "experts", "optimizer")
"""The fields of a plan that are rules for modules, except `sections`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Meaning):
    """A plan, resolved.

    Args:
        families: the `model_type`s that it is written for.
        options: the value of every option, after `--set`.
        tensor, experts: the rules of sections; kept over one rank too, where lowering drops them.
        sequence: the axes over which layouts are inferred.
        images: the axes whose ranks divide the images of a batch, or might.
        draws: lines of the model's code, besides nn.Dropout, that generate random numbers.
        context: the axes whose ranks have parts of each sequence.
        attention: modules in which these exchange otherwise than in others.
        sections: the rules for modules of sections that are folders, by name.
        replaced: rules of these sections that others were chosen for, after the checks.
        adapted: whether the model's facts already have the adapters and the dtypes of `load`.
        broken: sections with errors, from whose omissions no check may conclude anything.
    """

    name: str
    families: tuple[str, ...]
    options: Mapping[str, object]
    mesh: Mesh
    load: Load | None = None
    tensor: tuple[TensorRule, ...] = ()
    sequence: tuple[SequenceSetting, ...] = ()
    images: tuple[ImagesSetting, ...] = ()
    draws: tuple[str, ...] = ()
    sections: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    replaced: tuple[Any, ...] = ()
    fsdp: Fsdp | None = None
    context: tuple[ContextRule, ...] = ()
    attention: tuple[Attend, ...] = ()
    adapters: Adapters | None = None
    pipeline: PipelineRule | None = None
    experts: tuple[ExpertRule, ...] = ()
    optimizer: tuple[OptimizerRule, ...] = ()
    adapted: bool = False
    broken: frozenset[str] = frozenset()

    @property
    def _section_rules(self) -> Iterator[Any]:
        """The rules of all sections that are folders."""
        return (rule for rules in self.sections.values() for rule in rules)

    @property
    def checkpoint_rules(self) -> tuple[Checkpoint, ...]:
        """The rules whose modules are computed again in the backward pass."""
        return checkpoints(self._section_rules)

    @property
    def freezes(self) -> tuple[Freeze, ...]:
        """The rules that set which parameters train, outer modules first."""
        return freezes(self._section_rules)

    @property
    def freezes_known(self) -> bool:
        """Whether the section that sets which parameters train has no errors."""
        return "train" not in self.broken

    @property
    def compilations(self) -> tuple[Any, ...]:
        """The rules whose modules are compiled."""
        return tuple(r for r in self._section_rules if getattr(r, "compiled_modules", ()))

    @property
    def loss_rules(self) -> tuple[Any, ...]:
        """The rules in whose modules the loss is computed: they return no logits."""
        return tuple(rule for rule in self._section_rules if getattr(rule, "loss_modules", ()))

    def with_checkpoint_rules(self, rules: tuple[Checkpoint, ...]) -> Plan:
        """The plan with other rules in place of `checkpoint_rules`."""
        name = next(name for name, own in self.sections.items() if own == checkpoints(own))
        return replace(self, sections={**self.sections, name: rules})

    @property
    def acting(self) -> Iterator[tuple[Any, Modules]]:
        """Yields what acts on modules (rules, units, what is in no unit), and these."""
        for nodes in (*(getattr(self, name) for name in _RULES), *self.sections.values()):
            yield from ((node, node.modules) for node in nodes)
        yield from ((r, r.modules) for r in (self.adapters.rules if self.adapters else ()))
        if self.fsdp is not None:
            yield from ((ignored, ignored.modules) for ignored in self.fsdp.ignored)
            yield from ((spread, spread.modules) for spread in self.fsdp.spreads)
            yield from ((unit, m) for unit in self.fsdp.units for m in unit.members)

    def map_modules(self, place: Callable[[Modules, Span], Iterable[Modules]]) -> Plan:
        """Replaces the modules of each line, except in the load section and the pipeline."""

        def move(nodes: Iterable[Ruled]) -> tuple[Ruled, ...]:
            every = ((node, m) for node in nodes for m in place(node.modules, node.origin))
            return tuple(replace(node, modules=m) for node, m in every)

        fsdp = self.fsdp and replace(
            self.fsdp,
            units=tuple(part for unit in self.fsdp.units for part in unit.with_members(place)),
            ignored=move(self.fsdp.ignored),
            spreads=move(self.fsdp.spreads),
        )
        adapters = self.adapters and replace(self.adapters, rules=move(self.adapters.rules))
        rules: dict[str, Any] = {name: move(getattr(self, name)) for name in _RULES}
        own = {name: move(nodes) for name, nodes in self.sections.items()}
        rules["sections"] = {name: nodes for name, nodes in own.items() if nodes}
        return replace(self, fsdp=fsdp, adapters=adapters, **rules)

    @property
    def exchanges(self) -> Iterator[ContextParallel | Attend]:
        """The exchanges of attention over the axes that split sequences."""
        yield from (rule.op for rule in self.context if rule.op)
        yield from self.attention

    def split_of_heads(self, sizes: Mapping[str, int]) -> int:
        """The number of ranks over which attention heads are sharded: by tensor parallelism, times
        the Ulysses all-to-alls, on a mesh with axes of these sizes.
        """
        tensor = prod(sizes[a.name] for a in self.mesh.of_role(AxisRole.TENSOR))
        return tensor * lcm(*(op.ulysses_ranks(sizes[op.axis]) for op in self.exchanges))

    def dtype(self, parameter: Parameter) -> str:
        """The parameter's dtype after `load`."""
        return (
            parameter.dtype
            if self.load is None or self.adapted
            else self.load.dtype_after_load(parameter)
        )
