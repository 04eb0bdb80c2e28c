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
from planc.estimate.workload import (
    Attention,
    Collective,
    Group,
    Kind,
    Layer,
    Matmul,
    Precision,
    Recompute,
    Sharding,
    Workload,
)
from planc.lowering.memory import Holding, Holdings
from planc.model.facts import DTYPE_BYTES, Facts, Modules
from planc.model.indices import Indices
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import AxisRole
from planc.ops.layouts import Replicate, Shard
from planc.ops.styles import Colwise, Experts, Parameters, Replicated, Rowwise, Sequence
from planc.plan.apply_adapters import styles
from planc.plan.ir import LossRule, Plan, TensorRule, Unit

OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}
"""The number of states that an optimizer keeps for a parameter, in the parameter's dtype."""

_SPLITS = (Colwise, Rowwise, Experts, Parameters)


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

    def __post_init__(self) -> None:
        plan = self.plan
        every = [*plan.tensor, *styles(plan)]
        alive = [r for r in every if plan.mesh.size(r.axis) > 1 and r.style != Replicated()]
        self.rules = tuple(alive)
        self.holdings = Holdings(self.facts, plan, alive)

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
        shard, replicate = self._axes()
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
                names = frozenset(part.like)
                inside = [h for h in self.holdings.all if _is_in(h, names)]
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

    def _layer(self, part: Part, inside: list[Holding], counted: Counted | None) -> Layer:
        times = len(part.like)
        local = sum(prod(h.local) * h.count for h in inside) // times
        trained = sum(prod(h.local) * h.count for h in inside if h.parameter.trainable) // times
        unit = next((h.unit for h in inside if h.unit is not None), None)
        last = bool(part.products) and not part.at
        if not part.at and self.plan.loss:  # the loss keeps no logits
            part = replace(part, saved=tuple(s for s in part.saved if s.module))
        split = _Split(self, part)
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


class _Split:
    """How the plan's tensor-parallel rules split what one part computes and keeps."""

    def __init__(self, work: PlanWork, part: Part) -> None:
        self.work, self.part = work, part
        self.factors: dict[str, int] = {}
        self.name = part.like[0]
        rules = ((self._below(r.modules), r) for r in work.rules)
        self.ruled = {name: r for name, r in rules if name is not None}
        self.ranks = work.size(AxisRole.TENSOR)
        norms = any(isinstance(r.style, Sequence) for r in self.ruled.values())
        self.stream = self.ranks if norms else 1
        """Over how many ranks the residual stream is split."""

    def _below(self, modules: Modules) -> str | None:
        """The module's name below this part, None where it is elsewhere."""
        depth = len(self.name.split(".")) if self.name else 0
        head, rest = modules.path[:depth], modules.path[depth:]
        listed = any(isinstance(s, Indices) for s in rest)
        if not Modules(head, modules.module).has(self.name) or (listed and not self.name):
            return None
        return ".".join(s if isinstance(s, str) else str(s.first) for s in rest)

    def _style(self, module: str) -> object:
        rule = self.ruled.get(module)
        return rule.style if rule else None

    def factor(self, module: str) -> int:
        """Over how many ranks what the module itself works on is split."""
        if module not in self.factors:
            self.factors[module] = self._factor(module)
        return self.factors[module]

    def _factor(self, module: str) -> int:
        style = self._style(module)
        if not module and not self.name:  # the loss: its logits are whole
            return 1
        if isinstance(style, Sequence | Rowwise | Experts):
            return self.ranks
        if isinstance(style, Colwise):
            return 1
        holder = module
        while holder:
            children = [s for n, s in self.ruled.items() if n.rpartition(".")[0] == holder]
            if any(isinstance(rule.style, _SPLITS) for rule in children):
                return self.ranks
            holder = holder.rpartition(".")[0]
        return self.stream

    def matmuls(self) -> Iterable[Matmul]:
        for p in self.part.products:
            style = self._style(p.module)
            m, n, k, count = p.m, p.n, p.k, p.count
            if isinstance(style, Colwise):
                n = -(-n // self.ranks)
            elif isinstance(style, Rowwise):
                k = -(-k // self.ranks)
            elif isinstance(style, Experts | Parameters):
                n, k = (-(-n // self.ranks), k) if n >= k else (n, -(-k // self.ranks))
            elif count > 1:
                count = -(-count // self.factor(p.module))
            yield Matmul(m=m, n=n, k=k, count=count)

    def attention(self) -> Iterable[Attention]:
        for a in self.part.attended:
            batch, heads, queries, keys, dim = a.shape
            yield Attention(
                batch=batch,
                heads=-(-heads // self.factor(a.module)),
                queries=queries,
                keys=keys * self.work.size(AxisRole.SEQUENCE),
                head_dim=dim,
            )

    def moved(self) -> float:
        return sum(m.size / self.factor(m.module) for m in self.part.moved)

    def kept(self) -> float:
        """Bytes that autograd keeps."""
        return sum(s.size / self.factor(s.module) for s in self.part.saved)

    def selective(self, rule: Checkpoint | None) -> float:
        """Bytes that selective checkpointing keeps: the layer's input, and outputs of the matmuls
        and the attention that the rule saves.
        """
        again = self.replayed(rule)
        if again is None:
            return 0.0
        width = DTYPE_BYTES.get(self.work.compute_dtype, 4)

        def products(some: Iterable[Matmul]) -> float:
            return sum(p.m * p.n * p.count * width for p in some)

        def outputs(some: Iterable[Attention]) -> float:
            return sum(a.batch * a.heads * a.queries * (a.head_dim * width + 4) for a in some)

        size = self.part.boundary / self.stream + products(self.matmuls()) - products(again[0])
        return size + outputs(self.attention()) - outputs(again[1])

    def replayed(
        self, rule: Checkpoint | None
    ) -> tuple[tuple[Matmul, ...], tuple[Attention, ...]] | None:
        """The matmuls and the attention that a rule with a list of what to save leaves out."""
        if rule is None or not rule.save:
            return None
        every = {s.name: s.every for s in rule.save}
        matmuls, attention = tuple(self.matmuls()), tuple(self.attention())
        if n := every.get("matmul"):
            matmuls = tuple(m for i, m in enumerate(matmuls) if i % n)
        return matmuls, () if "attention" in every else attention

    def collectives(self) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """Of each rowwise module: its partial output is all-reduced, or scattered along the
        sequence, where the next block gathers it. Backward does the reverse.
        """
        tensor = self.work.plan.mesh.of_role(AxisRole.TENSOR)
        group = self.work.group(*(a.name for a in tensor))
        rows = [r for r in self.ruled.values() if isinstance(r.style, Rowwise | Experts)]
        if group.size == 1 or not (rows or self.part.products):
            return (), ()
        width = self.part.boundary or self._hidden()
        found = []
        for rule in rows:
            scattered = isinstance(getattr(rule.style, "output", None), Shard)
            kinds = (Kind.REDUCE_SCATTER, Kind.ALL_GATHER) if scattered else (Kind.ALL_REDUCE,)
            found += [Collective(kind=k, size=width, group=group) for k in kinds]
        gathers = (Collective(kind=Kind.ALL_GATHER, size=2.0 * p.m * p.n, group=group)
                   for p in self.part.products if self._whole(p.module))  # fmt: skip
        return (*found, *gathers), tuple(found)

    def _whole(self, module: str) -> bool:
        """Whether a column layer's output is gathered, as logits are."""
        style = self._style(module)
        whole = isinstance(style, Colwise) and isinstance(style.output, Replicate)
        return whole and not self.work.plan.loss

    def _hidden(self) -> float:
        """Bytes of the residual stream outside the layers."""
        return max((s.size for s in self.part.saved if "norm" in s.module), default=0) / 2
