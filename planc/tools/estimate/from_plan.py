"""The work of a step of a compiled plan: counted parts, scaled by what the plan splits.

Bytes of parameters come from `planc.lowering.memory`, unit by unit; what a layer computes and
keeps comes from `kept_tensors`, counted without parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

from planc.infer.apply_adapters import styles
from planc.ir.experts import expert_styles, fullest
from planc.ir.nodes import Plan, TensorRule, Unit
from planc.ir.optimizer_dtype import assume_fp32_steps
from planc.lowering.collectives import by_pass
from planc.lowering.lower import lower, on_activations
from planc.lowering.memory import Holding, Holdings
from planc.lowering.pipeline_collectives import arguments_of, messages
from planc.lowering.step import During, Sent, Step
from planc.model.facts import DTYPE_BYTES, Facts, Modules, Segment
from planc.model.indices import Indices
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.ops.pipeline import Pipeline, stages_of_rank
from planc.ops.styles import Replicated
from planc.simulate.call_table import CallTable
from planc.simulate.count_calls import UncountedError, count_calls
from planc.tools.estimate.counted import Counted, MicroBatch, Part
from planc.tools.estimate.formats import formats
from planc.tools.estimate.fused_kernels import fuse
from planc.tools.estimate.optimizer_step import Where, states_of, update_of
from planc.tools.estimate.profiles import Stack
from planc.tools.estimate.tensor_split import (
    PartSplit,
    below,
    gradient_passes,
    logit_copies,
    recompute_of,
    unsplit,
)
from planc.tools.estimate.workload import (
    ElementSizes,
    Group,
    Layer,
    Sharding,
    Update,
    Ways,
    Workload,
)

OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}
"""The number of states that an optimizer keeps for a parameter, in the parameter's dtype."""


Spread = tuple[tuple[str, ...], tuple[str, ...]]
"""The axes that parameters are sharded over, and those they are replicated over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's batch: `global_batch` rows of `sequence` tokens in `micro_batches` per rank.

    Args:
        imbalance: how many times the mean of tokens the experts of the rank get that gets most.
    """

    global_batch: int
    sequence: int
    micro_batches: int = 1
    imbalance: float = 1.0


@dataclass(slots=True)
class PlanWork:
    """
    Args:
        plan, facts: as checked and lowered, with adapters applied.
        optimizer: a name of `OPTIMIZERS`.
        alike: the work of other plans for the model, by what decides who holds which parameters.
        kernels: as of `MicroBatch`.
        tables: the calls of modules whose plan says which are kept, counted for this step.
    """

    plan: Plan
    facts: Facts
    batch: Batch
    stack: Stack
    optimizer: str = "adamw"
    alike: dict[object, PlanWork] = field(default_factory=dict)
    kernels: bool = True
    rules: tuple[TensorRule, ...] = field(init=False)
    holdings: Holdings = field(init=False)
    spread: tuple[Spread, Spread | None] = field(init=False)
    inside: dict[str, list[Holding]] = field(init=False, default_factory=dict)
    sending: Lowered = field(init=False)
    step: Step = field(init=False)
    sent: tuple[tuple[Sent, Group], ...] = field(init=False)
    tables: Mapping[str, CallTable] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan = assume_fp32_steps(self.plan, self.facts) or self.plan
        wide = (r for r in (*plan.tensor, *styles(plan)) if plan.mesh.size(r.axis) > 1)
        self.rules = tuple(r for r in wide if r.style != Replicated())
        rules = (*self.rules, *expert_styles(plan))
        like = self.alike.setdefault(
            (plan.mesh, plan.fsdp, plan.freezes, plan.load, rules, plan.adapters), self
        )
        if like is self:
            self.holdings = Holdings(self.facts, plan, rules)
            self.spread = self._axes()
        else:  # units are compared by identity
            self.plan = replace(plan, fsdp=like.plan.fsdp)
            self.holdings, self.spread, self.inside = like.holdings, like.spread, like.inside
        self.sending = on_activations(self.plan, self.facts)

    @property
    def pipeline(self) -> Pipeline | None:
        return self.plan.pipeline.op if self.plan.pipeline else None

    @property
    def _ranks(self) -> int:
        """The number of pipeline ranks."""
        return self.plan.mesh.size(self.pipeline.axis) if self.pipeline else 1

    @property
    def parts(self) -> int:
        """Parts of the rows of a rank: a pipeline cuts each batch into microbatches."""
        return self.batch.micro_batches * (self.pipeline.microbatches if self.pipeline else 1)

    @property
    def rows(self) -> int:
        """Rows of one rank's micro-batch."""
        return self.batch.global_batch // (self.plan.mesh.ranks_of(AxisRole.DATA) * self.parts)

    @property
    def exchange(self) -> tuple[str, int, int]:
        """The attention's exchange, its ranks and `ulysses`, as in `MicroBatch`."""
        ops = (r.op for r in self.plan.context if r.op and self.plan.mesh.size(r.axis) > 1)
        found = next(ops, None)
        if found is None:
            return "", 1, 1
        return found.attention, self.plan.mesh.size(found.axis), found.ulysses

    @property
    def imbalance(self) -> float:
        """`Batch.imbalance`, where no limit of tokens is below it."""
        return fullest(self.plan, self.batch.imbalance)

    @property
    def divides(self) -> str:
        """The name of the ranks that divide experts, as of `group`; empty where none do."""
        experts = self.plan.mesh.experts
        return experts.ranks.name if experts and experts.ranks.size > 1 else ""

    @property
    def tokens(self) -> int:
        """Positions of a row on one rank."""
        return self.batch.sequence // self.plan.mesh.ranks_of(AxisRole.SEQUENCE)

    @property
    def micro_batch(self) -> MicroBatch:
        """The part of the step that is counted without parallelism."""
        ops = (r.op for r in self.plan.context if r.op and self.plan.mesh.size(r.axis) > 1)
        every = ((op.exchange, op.runs) for op in ops if op.states)
        states = next(every, ("", 1))
        job = self.rows, self.tokens, self.compute_dtype, self.exchange, states, self.kernels
        return MicroBatch(*job)

    @property
    def compute_dtype(self) -> str:
        """The dtype of most elements of parameters while they compute."""
        section = self.plan.fsdp
        given = section.precision.param if section and section.precision else None
        return given or self.holdings.main_dtype

    @property
    def width(self) -> int:
        """Bytes of an element of activations."""
        return DTYPE_BYTES.get(self.compute_dtype, 4)

    def group(self, *names: str) -> Group:
        """The ranks along some axes; the last axis of the mesh is the innermost."""
        experts = self.plan.mesh.experts
        if experts and {*names} & {*experts.sizes}:
            inner = self.group(*experts.axes).stride
            if experts.ranks.name not in names:
                inner *= experts.ranks.size
            return Group(name=" x ".join(names), size=self.plan.mesh.size(*names), stride=inner)
        every = self.plan.mesh.axes
        axes = [a for a in every if a.name in names]
        inner = prod(a.size for a in every[every.index(axes[-1]) + 1 :]) if axes else 1
        size = prod(a.size for a in axes)
        return Group(name=" x ".join(a.name for a in axes) or "data", size=size, stride=inner)

    def of_batch(self) -> Step:
        """The plan with its batch."""
        return Step(
            lowered=self.sending,
            config=self.facts.config,
            backward=self.holdings.backward,
            arguments=arguments_of(self.pipeline, self.facts),
            batch=self.batch.global_batch,
            sequence=self.batch.sequence,
            micro_batches=self.batch.micro_batches,
        )

    def workload(self, counted: Counted | None) -> Workload:
        """The step's work; without counts, parameters alone."""
        op, stages = self.pipeline, self.stages(counted)
        return Workload(
            stages=stages,
            **self.groups(),
            micro_batches=op.microbatches if op else self.batch.micro_batches,
            runs=self.batch.micro_batches if op else 1,
            schedule=op.schedule if op else "1f1b",
            rank_passes=op.rank_passes if op else (),
            chunks=len(stages) // self._ranks,
            staged=op is not None,
            messages=self._messages(stages),
            world=self.plan.mesh.world_size,
            tokens=self.batch.global_batch * self.batch.sequence,
            sharding=Sharding.FULL if self.plan.fsdp else Sharding.REPLICATED,
            precision=self._precision(),
            offload=self.plan.fsdp is not None and self.plan.fsdp.offload is not None,
            updates=tuple(self._updates()),
            origin=self.plan.fsdp.origin if self.plan.fsdp else None,
        )

    def _messages(self, stages: tuple[tuple[tuple[Layer, int], ...], ...]) -> Ways:
        """`Workload.messages`; what is not known counts as the input of a layer."""
        if self.pipeline is None:
            return ()
        usual = max((x.boundary for own in stages for x, _ in own), default=0.0)
        every = messages(self.pipeline, self.step)
        return tuple(
            (usual if one.there is None else one.there, usual if one.back is None else one.back)
            for one in every
        )

    def stages(self, counted: Counted | None) -> tuple[tuple[tuple[Layer, int], ...], ...]:
        """`Workload.stages`."""
        self.step = replace(self.of_batch(), computes=self.compute_dtype)
        if counted is not None:
            self.tables = self._calls()
            tokens = self.rows * self.tokens
            counted = fuse(counted, self.facts, self.stack.kernels, tokens, self.width)
        passed = (one for one in by_pass(self.step) if one.during is not During.STEP)
        group = cache(self.group)
        self.sent = tuple((one, _of_some(group(*one.axes), one)) for one in passed)
        layers = [*self._layers(counted)]
        return tuple(
            tuple((replace(x, resident=r[i] / n[i]), n[i]) for x, n, r in layers if n[i])
            for i in range(self.pipeline.stages if self.pipeline else 1)
        )

    def _calls(self) -> Mapping[str, CallTable]:
        budgets = tuple(rule.modules for rule in self.plan.replaced)
        stated = (rule for rule in self.plan.checkpoint_rules if any(s.calls for s in rule.save))
        others = (m for rule in stated for m in rule.modules.parts_outside(budgets))
        modules = (*budgets, *others)
        try:
            args = self.plan, self.facts, modules, self.rows, self.batch.sequence
            return count_calls(*args) if modules else {}
        except UncountedError:
            return {}

    def _updates(self) -> Iterator[Update]:
        """Yields the update by the optimizer section on each pipeline rank."""
        if self.plan.optimizer:
            step = replace(self.step, lowered=lower(self.plan, self.facts))
            for stage in step.lowered.stages:
                yield update_of(stage, step, self.plan, self.holdings, self.group)

    def groups(self) -> dict[str, Any]:
        """The groups of ranks that communicate, by their names in `Workload`."""
        (shard, replicate), apart = self.spread
        experts, mesh = self.plan.mesh.experts, self.plan.mesh
        axes = {
            "data": shard,
            "replicate": replicate,
            "tensor": tuple(a.name for a in mesh.of_role(AxisRole.TENSOR)),
            "context": tuple(a.name for a in mesh.of_role(AxisRole.SEQUENCE)),
            "pipeline": (self.pipeline.axis,) if self.pipeline else (),
            "experts": (experts.ranks.name,) if experts else (),
        }
        found: dict[str, Any] = {name: self.group(*names) for name, names in axes.items()}
        return found | {"apart": apart and tuple(self.group(*names) for names in apart)}

    def _axes(self) -> tuple[Spread, Spread | None]:
        """The axes that most parameters are sharded over and those they are replicated over; and
        the same of the largest unit whose axes are others, such as that of experts.
        """
        section, mesh = self.plan.fsdp, self.plan.mesh
        if section is None:
            return (tuple(a.name for a in mesh.of_role(AxisRole.DATA)), ()), None
        sizes: dict[Spread, int] = {}
        for unit in section.units:
            axes, size = section.axes(unit), self.holdings.of_unit(unit, None)[1]
            sizes[axes] = max(sizes.get(axes, 0), size)
        of_experts = {*mesh.experts.sizes} if mesh.experts else set()
        order = sorted(sizes, key=lambda a: (not of_experts.isdisjoint(a[0]), -sizes[a]))
        if not order:
            return (section.shard, section.replicate), None
        return order[0], order[1] if len(order) > 1 else None

    def _is_separate(self, unit: Unit | None) -> bool:
        section, apart = self.plan.fsdp, self.spread[1]
        return section is not None and unit is not None and section.axes(unit) == apart

    def _precision(self) -> ElementSizes:
        section = self.plan.fsdp
        rest = max((DTYPE_BYTES[h.parameter.dtype] for h in self.holdings.all), default=4)
        reduce = section.precision.reduce if section and section.precision else None
        return ElementSizes(
            rest=rest,
            compute=self.width,
            reduce=DTYPE_BYTES.get(reduce or "", self.width if section else rest),
            states=rest * OPTIMIZERS[self.optimizer],
        )

    def _layers(
        self, counted: Counted | None
    ) -> Iterator[tuple[Layer, Counter[int], Counter[int]]]:
        """Each kind of counted layer, then what is outside, unit by unit; with the number of equal
        ones by the stage of the pipeline, and that of those that stay gathered.
        """
        for part in counted.parts if counted else ():
            if part.at:
                inside = self._layer_holdings(part)
                staying = {*self._staying(part, inside)}
                for alike in self._by_rule(part):
                    n = Counter(map(self.stage_of, alike))
                    stay = Counter(self.stage_of(name) for name in alike if name in staying)
                    yield self._layer(part, inside, counted, None, alike[0]), n, stay
        lists = {part.at.rpartition(".")[0] for part in counted.parts} if counted else set()
        lists.discard("")
        rest = [h for h in self.holdings.all if not _is_in(h, lists)]
        for stage in range(self.pipeline.stages if self.pipeline else 1):
            here = [h for whole in rest for h in self._of_stage(whole, stage)]
            part = self._outer_part(counted, stage)
            bare = replace(part, saved=(), products=(), attended=(), moved=())
            units = list({id(h.unit): h.unit for h in here}.values())
            for i, unit in enumerate(units):
                inside = [h for h in here if h.unit is unit]
                names = () if unit is None or unit.group else unit.members[0].names()
                times = sum(self.stage_of(name) == stage for name in names) or 1
                last = i == len(units) - 1 and counted is not None
                one = part if last else replace(bare, like=("",) * times)
                layer = self._layer(one, inside, counted, stage if last else None)
                n = Counter({stage: len(one.like)})
                yield layer, n, n if self._stays(unit) else Counter()

    def _staying(self, part: Part, inside: list[Holding]) -> list[str]:
        """The layers of a part whose units stay gathered after a forward pass."""
        own = (h.unit for h in inside if not self._is_separate(h.unit))
        units = {id(u): u for u in own if u is not None and self._stays(u)}.values()
        names = [name for u in units for m in u.members for name in m.names()]
        depth = len(part.at.split("."))
        staying = {".".join(name.split(".")[:depth]) for name in names}
        outer = tuple(name and f"{name}." for name in names)
        return [name for name in part.like if name in staying or name.startswith(outer)]

    def _stays(self, unit: Unit | None) -> bool:
        """Whether a unit stays gathered after a forward pass, as replicas always do."""
        if unit is None or self.plan.fsdp is None:
            return False
        return unit.reshard is False or not self.plan.fsdp.axes(unit)[0]

    def stage_of(self, name: str) -> int:
        """The stage of the pipeline that has a module; what computes the loss is in the last."""
        op = self.pipeline
        if op is None:
            return 0
        head, _, rest = name.partition(f"{op.blocks}.")
        if rest and not head:
            return op.stage_of(int(rest.partition(".")[0]))
        after = (n for m in op.outputs for n in m.names())
        last = not name or any(f"{name}.".startswith(f"{n}.") for n in after)
        return op.stages - 1 if last else 0

    def _of_stage(self, holding: Holding, stage: int) -> Iterator[Holding]:
        """The part of some parameters that a stage holds; the first and the last share tied ones,
        of which one rank has no copy.
        """
        op = self.pipeline
        if op is None:
            yield holding
            return
        names = [*holding.modules.names()]
        own = [f"{name}.{holding.parameter.name}" for name in names]
        shared = next((s for s in op.shares if any(n in s.parameters for n in own)), None)
        if shared is not None:
            here = len(names) if stage in self._first_on_ranks(op, shared.stages) else 0
        else:
            here = sum(self.stage_of(name) == stage for name in names)
        if here:
            yield replace(holding, count=holding.count * here // len(names))

    def _first_on_ranks(self, op: Pipeline, stages: Iterable[int]) -> set[int]:
        """The first of these stages on each rank, which has no copy for the others."""
        every = (stages_of_rank(op.schedule, i, self._ranks, op.stages) for i in range(self._ranks))
        return {min(both) for own in every if (both := {*own} & {*stages})}

    def _outer_part(self, counted: Counted | None, stage: int) -> Part:
        """The work and the kept tensors of a stage outside all layers."""
        if counted is None:
            return Part(at="", like=("",))
        part = counted.parts[-1]
        lists: dict[str, Any] = {
            name: tuple(x for x in getattr(part, name) if self.stage_of(x.module) == stage)
            for name in ("saved", "products", "attended", "moved")
        }
        return replace(part, **lists)

    def _by_rule(self, part: Part) -> Iterable[list[str]]:
        """The layers of a part under each checkpoint rule, with products in the same formats."""
        found: dict[tuple[object, ...], list[str]] = {}
        for name in part.like:
            own = (i for i, rule in enumerate(self.plan.checkpoint_rules) if rule.modules.has(name))
            low = ((below(modules, name), one) for modules, one in formats(self.plan))
            rounded = frozenset((at, one) for at, one in low if at)
            found.setdefault((*own, rounded), []).append(name)
        return found.values()

    def _layer_holdings(self, part: Part) -> list[Holding]:
        """The parameters of the layers that a part stands for, which are some of a list's."""
        if part.at not in self.inside:
            path = part.at.split(".")[:-1]
            layers = Indices.from_numbers(int(name.rpartition(".")[2]) for name in part.like)
            found = (self._in_layers(h, (*path, layers)) for h in self.holdings.all)
            self.inside[part.at] = [h for h in found if h is not None]
        return self.inside[part.at]

    def _in_layers(self, holding: Holding, path: tuple[Segment, ...]) -> Holding | None:
        """The parameters of a holding in some layers of a list; None if it has none there."""
        modules = holding.modules.part_inside(Modules(path, holding.modules.module))
        if modules is None:
            return None
        owners = self.holdings.tied.owners(modules, holding.parameter.name)
        return replace(holding, modules=modules, count=owners) if owners else None

    def _layer(
        self,
        part: Part,
        inside: list[Holding],
        counted: Counted | None,
        stage: int | None,
        name: str = "",
    ) -> Layer:
        """A layer of a part: that of a name, for all under its checkpoint rule."""
        own = (h.unit for h in inside if h.unit is not None and not self._is_separate(h.unit))
        unit = next(own, None)
        last = bool(part.products) and not part.at
        if not part.at and self.plan.loss_rules:  # the loss keeps no logits
            part = replace(part, saved=tuple(s for s in part.saved if s.module))
        split = PartSplit(self, part, name)
        rule, sent = self._checkpoint(name), split.collectives(stage)
        matmuls, boundary = split.matmuls(), part.boundary / split.stream
        again, left = split.replayed_for_weights(rule, inside)
        return Layer(
            name=self._name(part, unit),
            **self._elements(inside, unit, len(part.like)),
            matmuls=matmuls,
            uneven=sum(m.flops for m in matmuls) - sum(m.flops for m in split.matmuls(1.0)),
            attention=tuple(split.attention()),
            moved=split.moved_bytes() + (gradient_passes(self.plan) if last else 0.0),
            kernels=len(part.moved) + len(part.products) + len(part.attended),
            kept=split.saved_bytes(),
            kept_selective=split.selective(rule),
            outputs=split.outputs(inside),
            scored=sum(s.size for s in part.saved if last and not s.module),
            again=again,
            left=left,
            boundary=boundary,
            transient=self._transient(split, counted if last else None),
            forward=sent[During.FORWARD],
            backward=sent[During.BACKWARD],
            repeated=None if rule and rule.save else sent[During.REPEATED],
            lookup=counted is not None and not part.at and not part.products,
            loss=last,
            at_once=bool(self.plan.loss_rules),
            **_checkpointing(split, rule),
            width=_gathered_width(unit, inside),
            narrow=_narrow(inside, name),
            origin=unit.origin if unit else None,
        )

    def _transient(self, split: PartSplit, counted: Counted | None) -> float:
        """`Layer.transient`; `counted` for what computes the loss."""
        if counted is None:
            return max(split.routed_row_bytes(), split.rounding())
        transient, width = self.stack.loss_transient, self.width
        if not self.stack.kernels.fused and not split.keeps_wide_loss(counted.logits):
            transient = min(transient, 2 * width)  # no copy in float32
        return logit_copies(self.plan, counted.logits, width, transient)

    def _elements(self, inside: list[Holding], unit: Unit | None, times: int) -> dict[str, Any]:
        """The elements of one of `times` equal layers in a unit, by their names in `Layer`."""
        every = {
            "parameters": sum(prod(h.local) * h.count for h in inside),
            "apart": sum(prod(h.local) * h.count for h in inside if self._is_separate(h.unit)),
            "frozen": sum(prod(h.local) * h.count for h in inside if not h.trains),
            "states": sum(self._states(h, "device") for h in inside),
            "hosted": sum(self._states(h, "host") for h in inside),
            "stored": sum(self._states(h, "checkpoint") for h in inside),
            "unsplit": sum(map(unsplit, inside)),
            "tied": sum(prod(h.local) for h in inside if h.trains and self._shared(h)),
        }
        trained = [h for h in inside if h.trains and not self._is_separate(h.unit)]
        each = {name: count // times for name, count in every.items()}
        last = prod(trained[-1].local) if trained else 0
        return {**each, "last": last, "root": self._root(unit)}

    def _root(self, unit: Unit | None) -> int:
        """`Layer.root` of a layer in a unit."""
        if unit is None or self.pipeline or not _of_root(unit):
            return 0
        every = (h for h in self.holdings.all if h.unit is unit and h.trains)
        return sum(prod(h.local) * h.count for h in every)

    def _shared(self, holding: Holding) -> bool:
        """Whether other modules of this rank have the same parameter."""
        every = (name.rpartition(".") for group in self.facts.ties for name in group)
        own = (path for path, _, last in every if last == holding.parameter.name)
        return self.pipeline is None and any(map(holding.modules.has, own))

    def _states(self, holding: Holding, where: Where) -> int:
        if not self.plan.optimizer:
            return 0
        ranks = self.holdings.ranks(holding)
        return states_of(holding, self.plan, ranks, where)

    def _name(self, part: Part, unit: Unit | None) -> str:
        if part.at:
            return part.at.rpartition(".")[0] + ".*"
        return " and ".join(str(m) for m in unit.members) if unit else "outside every unit"

    def _checkpoint(self, name: str) -> Checkpoint | None:
        """The rule that checkpoints a layer."""
        found = (r for r in self.plan.checkpoint_rules if r.modules.has(name))
        return next(found, None) if name else None


def _checkpointing(split: PartSplit, rule: Checkpoint | None) -> dict[str, Any]:
    """The recomputation of a layer under a rule, by the names of `Layer`."""
    return {
        "recompute": recompute_of(rule),
        "stops_early": split.stops_early(),
        "offloaded": rule is not None and rule.offload,
        "away": split.away(rule),
        "replayed": split.recomputed_work(rule),
        "moved_again": split.moved_again(rule),
    }


def _of_some(group: Group, sent: Sent) -> Group:
    """The group of a collective among some of the ranks of an axis."""
    if sent.among is None:
        return group
    ranks, every = sent.among
    return replace(group, size=ranks, stride=group.stride * every)


def _of_root(unit: Unit) -> bool:
    """Whether it is the unit of the whole model."""
    return any(not members.path for members in unit.members)


def _gathered_width(unit: Unit | None, inside: list[Holding]) -> int:
    """Bytes of an element of a unit that has a precision of its own, else 0."""
    own = unit and unit.precision
    return DTYPE_BYTES[own.param or inside[0].parameter.dtype] if own else 0


def _narrow(inside: list[Holding], name: str) -> int:
    """`Layer.narrow` of a layer."""
    elements, depth = 0, len(name.split(".")) if name else 0
    for h in inside:
        if h.narrow and below(h.modules, name) is not None:
            layers = prod(len(s) for s in h.modules.path[:depth] if isinstance(s, Indices))
            elements += prod(h.local) * h.count // layers
    return elements


def _is_in(holding: Holding, names: set[str]) -> bool:
    """Whether the modules of a parameter are inside one of those named."""
    parts = holding.modules.first_name.split(".")
    return any(".".join(parts[:n]) in names for n in range(len(parts), 0, -1))
