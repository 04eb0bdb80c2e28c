"""The lowered plan: ordered operations as plain data.

`apply` runs it, `lower` prints it, `diff` compares two of them, and emitted Python writes it out.
It names modules by path and holds no torch object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, TypeVar

from planc.diagnostics.diagnostic import Diagnostic, Label
from planc.diagnostics.notebook import InNotebooks
from planc.diagnostics.source import NOWHERE
from planc.model.facts import Modules
from planc.ops import base
from planc.ops.activation_checkpoint import Checkpoint, checkpoints
from planc.ops.backend import Backend
from planc.ops.call import Context
from planc.ops.compressed_weights import CompressedWeights
from planc.ops.context import ContextParallel
from planc.ops.freeze import Freeze, freezes
from planc.ops.fsdp import Divide, FullyShard
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.optimizer import Optimize, OptimizerClass
from planc.ops.pipeline import Pipeline
from planc.ops.registry import AnyOp
from planc.ops.styles import Custom
from planc.ops.tensor_parallel import Parallelize

FORMAT_VERSION = 2
OpT = TypeVar("OpT", bound=base.Op)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """An axis of the mesh.

    Args:
        name: in the plan.
        size: the number of ranks along it.
        role: what its ranks split among them.
        inferred: whether its size was `auto`.
        origin: the line that decided the size.
    """

    name: base.Name
    size: base.Size
    role: base.AxisRole = base.AxisRole.DATA
    inferred: bool = False
    origin: base.Origin = field(
        default=NOWHERE, compare=False, repr=False, metadata=base.key("place")
    )

    @property
    def label(self) -> Label:
        """The line that decided the size, which it says."""
        return Label(span=self.origin, text=f"{self.name} is {self.size}")

    @property
    def place(self) -> str:
        return self.origin.place


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMesh:
    """The ranks along some axes, as a mesh of ranks with equal and ranks with different experts.

    Rank r along the axes has the coordinates (r // ranks, r % ranks), so the innermost ranks hold
    different experts.

    Args:
        ranks: the expert-parallel ranks, which hold different experts.
        rest: the ranks with the same experts, over which FSDP shards them.
        axes: the axes that contain both, outermost first.
        inside: axes over which styles shard the weights of each expert; none of `axes`.
    """

    ranks: MeshAxis
    rest: MeshAxis
    axes: base.Axes
    inside: base.Axes = field(default=(), metadata=base.OMIT)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of both by name."""
        return {part.name: part.size for part in (self.rest, self.ranks)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The operations of one pipeline rank, and their memory.

    They hold one stage of the pipeline, or several where the schedule interleaves stages. A plan
    without a pipeline has one.

    Args:
        parameters: bytes of parameters that one rank holds at rest.
        gathered: bytes of the largest unit while it is all-gathered.
        steps: the dtypes of the parameters that the optimizer steps; no operation depends on them.
        ops: in the order in which `apply` runs them.
    """

    parameters: base.Count = 0
    gathered: base.Count = 0
    steps: tuple[base.Dtype, ...] = field(default=(), compare=False, metadata=base.OMIT)
    ops: tuple[AnyOp, ...]


ListName = Annotated[str, base.text("list", "a list of modules", r"[\w.*-]+")]
_MESH = base.Form({"minItems": 1, "maxItems": 16})
_STAGES = base.Form({"minItems": 1, "maxItems": 1024})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered(InNotebooks):
    """A plan for one model on one mesh, ready to run.

    Args:
        plan: the plan's name.
        model: the model's class.
        family: its `model_type`.
        layers: the length of its longest list of blocks.
        module_dicts: its lists that are an nn.ModuleDict, whose entries have texts for keys; `*` is
            for indices.
        axes: the mesh, outermost first.
        experts: the expert-parallel ranks; None without expert parallelism.
        data: the axes whose ranks read different data; sampler rank and size follow from them.
        stages: the operations of each pipeline rank, in order; one without a pipeline.
        findings: what the compiler and the checks say of the plan, if `planc.lower` made it.
    """

    plan: base.Name
    model: base.Name
    family: base.Name
    layers: base.Count
    axes: Annotated[tuple[MeshAxis, ...], _MESH] = field(metadata=base.key("mesh"))
    experts: ExpertMesh | None = field(default=None, metadata=base.OMIT)
    data: base.Axes
    stages: Annotated[tuple[Stage, ...], _STAGES]
    module_dicts: tuple[ListName, ...] = field(default=(), metadata=base.OMIT)
    findings: tuple[Diagnostic, ...] = field(
        default=(), compare=False, repr=False, metadata=base.NOT_WRITTEN
    )

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of the first ranks; None without one."""
        return next((op for op in self.stages[0].ops if isinstance(op, Pipeline)), None)

    @property
    def backend(self) -> Backend | None:
        """The call of a backend in the place of FSDP's; None without one."""
        return next((op for op in self.ops if isinstance(op, Backend)), None)

    @property
    def styles(self) -> list[Parallelize]:
        """The operations that apply styles over tensor axes, in order."""
        return self.find_ops(Parallelize)

    @property
    def checkpoint_ops(self) -> tuple[Checkpoint, ...]:
        """The operations whose modules are computed again in the backward pass."""
        return checkpoints(self.ops)

    @property
    def freezes(self) -> tuple[Freeze, ...]:
        """The operations that set which parameters train, in order."""
        return freezes(self.ops)

    @property
    def compilations(self) -> tuple[tuple[AnyOp, Modules], ...]:
        """The modules that are compiled, each set with its operation."""
        return tuple((op, modules) for op in self.ops for modules in op.compiled_modules)

    @property
    def loss_heads(self) -> tuple[Modules, ...]:
        """The modules that compute the loss, and return no logits."""
        return tuple(modules for op in self.ops for modules in op.loss_modules)

    @property
    def adapters(self) -> list[Adapt]:
        """The operations that add adapters, in order."""
        return self.find_ops(Adapt)

    @property
    def compressions(self) -> tuple[CompressedWeights, ...]:
        """The operations that store weights of layers with adapters in fewer bits."""
        return tuple(op for op in self.ops if isinstance(op, CompressedWeights))

    @property
    def state_updates(self) -> tuple[str, ...]:
        """The functions whose recurrent states any rank resets at documents."""
        return tuple(sorted({part for op in self.ops for part in op.state_updates}))

    @property
    def shared_encoders(self) -> tuple[Modules, ...]:
        """The modules whose encoders run on all data ranks, if batches of some have inputs."""
        return tuple(modules for op in self.ops for modules in op.shared_encoders)

    @property
    def divided_encoders(self) -> tuple[str, ...]:
        """The modules and parameters that each rank of an axis uses for inputs of its own."""
        return tuple(name for op in self.ops for name in op.divided_encoders)

    @property
    def contexts(self) -> list[ContextParallel]:
        """The operations that split sequences, or images, over an axis."""
        return self.find_ops(ContextParallel)

    @property
    def optimizer_rules(self) -> list[Optimize]:
        """The operations that decide how parameters are stepped; none without the section."""
        return self.find_ops(Optimize)

    @property
    def fsdp_units(self) -> list[FullyShard]:
        """The operations that make units of FSDP, in order; none with a backend."""
        return self.find_ops(FullyShard)

    @property
    def load(self) -> Load:
        """The operation that loads weights; the default one without a load section."""
        return next(iter(self.find_ops(Load)), Load())

    @property
    def ops(self) -> tuple[AnyOp, ...]:
        """The operations of all stages, in order; what is the same on several, once."""
        if len(self.stages) == 1:
            return self.stages[0].ops
        return tuple(dict.fromkeys(op for stage in self.stages for op in stage.ops))

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections in whose folders its operations are."""
        return tuple(dict.fromkeys(op.SECTION for op in self.ops if op.SECTION))

    @property
    def packages(self) -> set[str]:
        """The libraries, in addition to torch and the model's, that its operations require."""
        return {r.distribution for op in self.ops for r in op.requirements}

    @property
    def parameters(self) -> int:
        """Bytes of parameters that one rank holds at rest, the maximum over stages."""
        return max(stage.parameters for stage in self.stages)

    @property
    def largest_gathered(self) -> int:
        """Bytes of the largest unit of any stage while it is all-gathered."""
        return max(stage.gathered for stage in self.stages)

    def map_ops(self, change: Callable[[tuple[AnyOp, ...]], Iterable[AnyOp]]) -> Lowered:
        """This plan with other operations: `change` maps those of each stage."""
        stages = (replace(stage, ops=tuple(change(stage.ops))) for stage in self.stages)
        return replace(self, stages=tuple(stages))

    def without(self, *kinds: type[base.Op]) -> Lowered:
        """This plan without operations of these kinds."""
        return self.map_ops(lambda ops: (op for op in ops if not isinstance(op, kinds)))

    def find_ops(self, kind: type[OpT]) -> list[OpT]:
        """The operations of a kind, in order."""
        return [op for op in self.ops if isinstance(op, kind)]

    def has(self, *kinds: type[base.Op]) -> bool:
        """Whether there is an operation of one of these kinds."""
        return any(isinstance(op, kinds) for op in self.ops)

    @property
    def has_root_unit(self) -> bool:
        """Whether the model itself is a unit of FSDP, with all other units inside."""
        return any(not modules.path for op in self.find_ops(FullyShard) for modules in op.members)

    @property
    def code(self) -> tuple[str, ...]:
        """`package.module:Class` of each style and optimizer of the user's: `apply` imports it."""
        styles = (op.style for op in self.find_ops(Parallelize))
        paths = [s.path for s in styles if isinstance(s, Custom)]
        return tuple(dict.fromkeys((*paths, *(op.path for op in self.optimizer_classes))))

    @property
    def optimizer_classes(self) -> tuple[OptimizerClass, ...]:
        """The user-defined optimizers."""
        algorithms = (op.algorithm for op in self.optimizer_rules)
        return tuple(a for a in algorithms if isinstance(a, OptimizerClass))

    @property
    def world_size(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def sequence_parts(self) -> int:
        """The ranks that each sequence is split over."""
        return self.axis_size(*self.split_axes(base.AxisRole.SEQUENCE))

    def split_axes(self, *roles: base.AxisRole) -> tuple[str, ...]:
        """The axes over which operations split work of these roles, in the order of operations."""
        axes = (axis for op in self.ops if op.ROLE in roles for axis in op.split_axes)
        return tuple(dict.fromkeys(axes))

    @property
    def wide_data(self) -> tuple[str, ...]:
        """The data axes of more than one rank."""
        return tuple(a.name for a in self.axes if a.name in self.data and a.size > 1)

    @property
    def averaged_axes(self) -> tuple[str, ...]:
        """The axes that gradients are averaged over: data and sequence axes."""
        units = [op for op in self.ops if isinstance(op, FullyShard | Backend)]
        names = {name for op in units for name in (*op.shard, *op.replicate)}
        # a unit may be sharded over tensor ranks too, which have equal gradients
        context = (a.name for a in self.axes if a.role is base.AxisRole.SEQUENCE)
        names &= {*self.data, *context}
        return tuple(a.name for a in self.axes if a.name in names)

    @property
    def summed_gradients(self) -> str:
        """The divisor of gradients, if it does not make them the mean over data ranks, as a phrase;
        else an empty text.
        """
        ranks = self.axis_size(*self.averaged_axes)
        divide = next((op for op in self.find_ops(Divide) if not op.units), None)
        if divide is None or divide.factor == ranks:
            return ""
        return f"for a loss that is a sum: {divide.headline()}"

    def context(self, *, fills: bool = False) -> Context:
        """The mesh as the calls of operations need it; `fills` as for `Context`."""
        experts = self.experts
        return Context(
            axes={axis.name: axis.size for axis in self.axes},
            experts=experts.sizes if experts else {},
            expert_axes=experts.axes if experts else (),
            fills=fills,
            rooted=self.has_root_unit,
        )

    def stride(self, axis: str) -> int:
        """The distance of ranks that are neighbors along an axis: the ranks of the axes inside
        it.
        """
        names = [a.name for a in self.axes]
        return prod(a.size for a in self.axes[names.index(axis) + 1 :])

    def axis_size(self, *names: str) -> int:
        experts = (self.experts.rest, self.experts.ranks) if self.experts else ()
        return prod(axis.size for axis in (*self.axes, *experts) if axis.name in names)
