"""The work of a step of a compiled plan: counted parts, scaled by what the plan splits.

Bytes of parameters come from `planc.lowering.memory`, unit by unit; what a layer computes and
keeps comes from `kept_tensors`, counted without parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod

from planc.estimate.counted import Counted, Part
from planc.estimate.profiles import Stack
from planc.estimate.tensor_split import Split
from planc.estimate.workload import Group, Layer, Precision, Recompute, Sharding, Workload
from planc.lowering.memory import Holding, Holdings
from planc.model.facts import DTYPE_BYTES, Facts
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import AxisRole
from planc.ops.styles import Replicated
from planc.plan.apply_adapters import styles
from planc.plan.ir import LossRule, Plan, TensorRule, Unit

OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}
"""The number of states that an optimizer keeps for a parameter, in the parameter's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's batch: `global_batch` rows of `sequence` tokens in `micro_batches` per rank."""

    global_batch: int
    sequence: int
    micro_batches: int = 1


@dataclass(slots=True)
class PlanWork:
    """
    Args:
        plan, facts: as checked and lowered, with adapters applied.
        batch: of the step.
        optimizer: a name of `OPTIMIZERS`.
    """

    plan: Plan
    facts: Facts
    batch: Batch
    stack: Stack
    optimizer: str = "adamw"
    rules: tuple[TensorRule, ...] = field(init=False)
    holdings: Holdings = field(init=False)
    spread: tuple[tuple[str, ...], tuple[str, ...]] = field(init=False)
    inside: dict[str, list[Holding]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        every = [*plan.tensor, *styles(plan)]
        alive = [r for r in every if plan.mesh.size(r.axis) > 1 and r.style != Replicated()]
        self.rules = tuple(alive)
        self.holdings = Holdings(self.facts, plan, alive)
        self.spread = self._axes()

    def size(self, role: AxisRole) -> int:
        return prod(a.size for a in self.plan.mesh.of_role(role))

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows."""
        return self.size(AxisRole.DATA)

    @property
    def rows(self) -> int:
        """Rows of one rank's micro-batch."""
        return self.batch.global_batch // (self.data_ranks * self.batch.micro_batches)

    @property
    def tokens(self) -> int:
        """Positions of a row on one rank."""
        return self.batch.sequence // self.size(AxisRole.SEQUENCE)

    @property
    def compute_dtype(self) -> str:
        """Of most parameters while they compute."""
        section = self.plan.fsdp
        stored = {h.parameter.dtype: h.count for h in self.holdings.all}
        given = section.precision.param if section and section.precision else None
        return given or max(stored, key=lambda d: stored[d], default="float32")

    def group(self, *names: str) -> Group:
        """The ranks along some axes; the last axis of the mesh is the innermost."""
        axes = [a for a in self.plan.mesh.axes if a.name in names]
        inner = 1
        if axes:
            at = self.plan.mesh.axes.index(axes[-1])
            inner = prod(a.size for a in self.plan.mesh.axes[at + 1 :])
        size = prod(a.size for a in axes)
        return Group(name=" x ".join(a.name for a in axes) or "data", size=size, stride=inner)

    def workload(self, counted: Counted | None) -> Workload:
        """The step's work; without counts, parameters alone."""
        groups = self.groups()
        return Workload(
            stages=((*self._layers(counted),),),
            data=groups["data"],
            replicate=groups["replicate"],
            tensor=groups["tensor"],
            context=groups["context"],
            micro_batches=self.batch.micro_batches,
            tokens=self.batch.global_batch * self.batch.sequence,
            sharding=Sharding.FULL if self.plan.fsdp else Sharding.REPLICATED,
            precision=self._precision(),
        )

    def groups(self) -> dict[str, Group]:
        """The groups of ranks that communicate, by their names in `Workload`."""
        shard, replicate = self.spread
        roles = {"tensor": AxisRole.TENSOR, "context": AxisRole.SEQUENCE}
        axes = {n: [a.name for a in self.plan.mesh.of_role(r)] for n, r in roles.items()}
        axes |= {"data": list(shard), "replicate": list(replicate)}
        return {name: self.group(*names) for name, names in axes.items()}

    def _axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that most parameters are sharded over, and those they are replicated over."""
        section = self.plan.fsdp
        if section is None:
            return tuple(a.name for a in self.plan.mesh.of_role(AxisRole.DATA)), ()
        units = section.units
        largest = max(units, key=lambda u: self.holdings.of_unit(u, None)[1], default=None)
        return section.axes(largest) if largest else (section.shard, section.replicate)

    def _precision(self) -> Precision:
        section = self.plan.fsdp
        rest = max((DTYPE_BYTES[h.parameter.dtype] for h in self.holdings.all), default=4)
        compute = DTYPE_BYTES.get(self.compute_dtype, 4)
        reduce = section.precision.reduce if section and section.precision else None
        return Precision(
            rest=rest,
            compute=compute,
            reduce=DTYPE_BYTES.get(reduce or "", compute if section else rest),
            states=rest * OPTIMIZERS[self.optimizer],
        )

    def _layers(self, counted: Counted | None) -> Iterable[tuple[Layer, int]]:
        """Each kind of counted layer, then what is outside, unit by unit."""
        claimed: list[Holding] = []
        for part in counted.parts if counted else ():
            if part.at:
                inside = self._inside(part)
                claimed += inside
                yield self._layer(part, inside, counted), len(part.like)
        taken = {id(h) for h in claimed}
        rest = [h for h in self.holdings.all if id(h) not in taken]
        outside = counted.parts[-1] if counted else Part(at="", like=("",))
        bare = replace(outside, saved=(), products=(), attended=(), moved=())
        units = list({id(h.unit): h.unit for h in rest}.values())
        for i, unit in enumerate(units):
            inside = [h for h in rest if h.unit is unit]
            times = 1 if unit is None or unit.group else len(unit.members[0])
            last = i == len(units) - 1 and counted is not None
            part = outside if last else replace(bare, like=("",) * times)
            yield self._layer(part, inside, counted), len(part.like)

    def _inside(self, part: Part) -> list[Holding]:
        """The parameters of the layers that a part stands for."""
        if part.at not in self.inside:
            names = frozenset(part.like)
            self.inside[part.at] = [h for h in self.holdings.all if _is_in(h, names)]
        return self.inside[part.at]

    def _layer(self, part: Part, inside: list[Holding], counted: Counted | None) -> Layer:
        times = len(part.like)
        local = sum(prod(h.local) * h.count for h in inside) // times
        trained = sum(prod(h.local) * h.count for h in inside if h.parameter.trainable) // times
        unit = next((h.unit for h in inside if h.unit is not None), None)
        last = bool(part.products) and not part.at
        if not part.at and self.plan.loss:  # the loss keeps no logits
            part = replace(part, saved=tuple(s for s in part.saved if s.module))
        split = Split(self, part)
        forward, backward = split.collectives()
        return Layer(
            name=self._name(part, unit),
            parameters=local,
            frozen=local - trained,
            matmuls=tuple(split.matmuls()),
            attention=tuple(split.attention()),
            moved=split.moved() + (self._chunk_passes() if last else 0.0),
            kernels=len(part.moved) + len(part.products) + len(part.attended),
            kept=split.kept(),
            kept_selective=split.selective(self._checkpoint(part)),
            boundary=part.boundary / split.stream,
            transient=self._copies(counted.logits) if counted and last else 0.0,
            forward=forward,
            backward=backward,
            lookup=counted is not None and not part.at and not part.products,
            loss=last,
            resident=unit is not None and unit.reshard is False,
            recompute=self._recompute(part),
            replayed=split.replayed(self._checkpoint(part)),
            origin=unit.origin if unit else None,
        )

    def _name(self, part: Part, unit: Unit | None) -> str:
        if part.at:
            return part.at.rpartition(".")[0] + ".*"
        return " and ".join(str(m) for m in unit.members) if unit else "outside every unit"

    def _copies(self, logits: int) -> float:
        """Bytes of logits beside what is kept for backward.

        A loss in chunks has those of two chunks in the compute dtype and in float32, and sums the
        gradients of the head's weight and input in float32, which it casts at the end beside the
        last chunk's (`planc.runtime.standalone.loss`; measured on an H100 within 2 %).
        """
        if not self.plan.loss:
            return logits * self.stack.loss_transient
        rule, weight = self._head()
        width = DTYPE_BYTES.get(self.compute_dtype, 4)
        vocabulary, features = rule.modules.module.parameters[0].shape
        chunk = logits / rule.op.chunks * weight / (vocabulary * features)
        trained = weight * rule.modules.module.parameters[0].trainable
        gradients = trained + logits / vocabulary * features
        last = width * gradients + (4 + width) * chunk
        return 4 * gradients + max((12 if rule.op.chunks > 1 else 8) * chunk, last)

    def _head(self) -> tuple[LossRule, float]:
        """The rule of the loss in chunks, and the elements of its head's weight on one rank."""
        rule = self.plan.loss[0]
        ranks = self.plan.mesh.size(rule.axis) if rule.axis else 1
        vocabulary, features = rule.modules.module.parameters[0].shape
        return rule, -(-vocabulary // ranks) * features

    def _chunk_passes(self) -> float:
        """A third of the bytes that a loss in chunks moves for the gradient of the head's weight:
        backward counts the other two. Each chunk writes, reads and adds a gradient; it is zeroed
        before, and cast and scaled after.
        """
        if not self.plan.loss:
            return 0.0
        rule, weight = self._head()
        return (12 * rule.op.chunks + 14) * weight / 3

    def _checkpoint(self, part: Part) -> Checkpoint | None:
        """The rule that checkpoints a layer."""
        for rule in self.plan.checkpoint:
            if part.at and any(rule.modules.has(name) for name in part.like):
                return rule
        return None

    def _recompute(self, part: Part) -> Recompute:
        rule = self._checkpoint(part)
        if rule is None:
            return Recompute.NONE
        return Recompute.SELECTIVE if rule.save else Recompute.FULL


def _is_in(holding: Holding, names: frozenset[str]) -> bool:
    """Whether the module of a parameter is one of those named or inside one."""
    parts = next(holding.modules.names()).split(".")
    return any(".".join(parts[:n]) in names for n in range(len(parts), 0, -1))
