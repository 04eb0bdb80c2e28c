"""Divides the work, the memory and the traffic of one layer by a plan's tensor-parallel rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from math import ceil, prod
from typing import Protocol

from planc.ir.experts import dividing
from planc.ir.nodes import ExpertRule, Plan, TensorRule
from planc.lowering.context_collectives import attending
from planc.lowering.memory import Holding
from planc.lowering.step import EXCHANGE, During, Sent, Step
from planc.model.config import integer_of
from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import AxisRole
from planc.ops.context import Attend
from planc.ops.contract import Contract, Side, contract
from planc.ops.expert_parallel import ALL_REDUCE
from planc.ops.layouts import Replicate, Shard
from planc.sections import Hook
from planc.simulate.call_table import CallTable
from planc.tools.estimate.counted import Part
from planc.tools.estimate.formats import formats
from planc.tools.estimate.profiles import Stack
from planc.tools.estimate.workload import Attention, Collective, Group, Matmul, Recompute


def _splits_between(made: Contract) -> bool:
    """Whether what is computed between modules of such styles is split: not where each takes and
    gives whole activations.
    """
    match made.splits:
        case Side.OUT:
            return made.gives[0].target != Replicate()
        case Side.IN:
            return made.takes[0].source not in (Replicate(), Shard(1))
        case Side.INSIDE:
            return not made.gives
    return False


def _whole_module(made: Contract) -> bool:
    """Whether a style splits all that its module computes, and sums at the end."""
    return made.splits is Side.INSIDE and bool(made.gives)


@lru_cache(maxsize=4096)  # a search asks the same for many plans
def below(modules: Modules, name: str) -> str | None:
    """The name of modules below the part of a name, None where they are elsewhere."""
    depth = len(name.split(".")) if name else 0
    head, rest = modules.path[:depth], modules.path[depth:]
    listed = any(isinstance(s, Indices) for s in rest)
    if not Modules(head, modules.module).has(name) or (listed and not name):
        return None
    return ".".join(s if isinstance(s, str) else str(s.first) for s in rest)


class Work(Protocol):
    """The whole step; `planc.tools.estimate.from_plan.PlanWork` describes each attribute."""

    plan: Plan
    stack: Stack
    rules: tuple[TensorRule, ...]
    step: Step
    sent: tuple[tuple[Sent, Group], ...]
    tables: Mapping[str, CallTable]

    @property
    def exchange(self) -> tuple[str, int, int]: ...

    @property
    def width(self) -> int: ...

    @property
    def imbalance(self) -> float: ...

    @property
    def divides(self) -> str: ...

    def stage_of(self, name: str) -> int: ...


class PartSplit:
    """Splits the work and the kept tensors of one part by the plan's tensor-parallel rules.

    Args:
        name: of the layer that is meant, the first one by default.
    """

    def __init__(self, work: Work, part: Part, name: str = "") -> None:
        self.work, self.part = work, part
        self.factors: dict[str, int] = {}
        self.ways: dict[str, ExpertRule | None] = {}
        self.products: dict[float, tuple[Matmul, ...]] = {}
        self.name = name or part.like[0]
        rules = ((below(r.modules, self.name), r) for r in work.rules)
        self.ruled = {name: r for name, r in rules if name is not None}
        self.ranks = work.plan.mesh.ranks_of(AxisRole.TENSOR)
        experts = work.plan.mesh.experts
        self.experts = experts.ranks.size if experts else 1
        self.senders = 1 if experts and experts.inside else self.ranks
        """The ranks with equal tokens that each dispatch a part of them to the experts."""
        found = ((below(r.modules, self.name), r) for r in dividing(work.plan))
        self.divided = {name: rule for name, rule in found if name is not None}
        """The rules that dispatch tokens to the experts of modules, by the modules that ranks
        divide."""
        low = ((below(modules, self.name), one) for modules, one in formats(work.plan))
        self.formats = {name: one for name, one in low if name is not None}
        """The formats of modules whose products have rounded operands."""
        made = (contract(r.style) for r in self.ruled.values())
        norms = any(c.sums and c.takes[0].target == Shard(1) for c in made)
        self.stream = self.ranks if norms else 1
        """Over how many ranks the residual stream is split."""

    def _contract(self, module: str) -> Contract:
        rule = self.ruled.get(module)
        return contract(rule.style) if rule else Contract()

    def factor(self, module: str) -> int:
        """Over how many ranks what the module itself works on is split."""
        if module not in self.factors:
            self.factors[module] = self._factor(module)
        return self.factors[module]

    def _factor(self, module: str) -> int:
        made = self._contract(module)
        if not module and not self.name:  # the loss: its logits are whole
            return 1
        if way := self._dispatch(module):  # ranks with equal tokens send a part each
            return self.experts if way.dispatch == ALL_REDUCE else self.ranks
        if made.splits is Side.IN or made.sums or _whole_module(made):
            return self.ranks
        if made.splits is Side.OUT:
            return 1
        holder = module
        while holder:
            if _whole_module(self._contract(holder)):
                return self.ranks
            every = (self._contract(n) for n in self.ruled if n.rpartition(".")[0] == holder)
            children = [found for found in every if found.splits]
            if children:
                return self.ranks if any(map(_splits_between, children)) else 1
            holder = holder.rpartition(".")[0]
        return self.stream

    def _dispatch(self, module: str) -> ExpertRule | None:
        """The dispatch rule of the expert-parallel module that contains `module`, or None."""
        if module not in self.ways:
            every = self.divided.items()
            inside = (way for name, way in every if f"{module}.".startswith(f"{name}."))
            self.ways[module] = next(inside, None)
        return self.ways[module]

    def matmuls(self, most: float | None = None) -> tuple[Matmul, ...]:
        """Products of one rank, whose experts get `most` times the mean of tokens."""
        most = self.work.imbalance if most is None else most
        if most not in self.products:
            self.products[most] = tuple(self._matmuls(most))
        return self.products[most]

    def _matmuls(self, most: float) -> Iterator[Matmul]:
        for p in self.part.products:
            splits = self._contract(p.module).splits
            m, n, k, count = p.rows, p.n, p.k, p.count
            if way := self._dispatch(p.module):
                count = -(-count // self.experts)
                m = m if way.dispatch == ALL_REDUCE else -(-m * self.experts // self.senders)
                m = ceil(m * most)
                if self.senders < self.ranks:
                    n, k = (-(-n // self.ranks), k) if n >= k else (n, -(-k // self.ranks))
            elif splits is Side.OUT:
                n = -(-n // self.ranks)
            elif splits is Side.IN:
                k = -(-k // self.ranks)
            elif splits is Side.INSIDE:
                n, k = (-(-n // self.ranks), k) if n >= k else (n, -(-k // self.ranks))
            elif count > 1:
                count = -(-count // self.factor(p.module))
            low = self.formats.get(p.module)
            kind = {"grouped": p.divided, "joined": p.joined}
            yield Matmul(m=m, n=n, k=k, count=count, format=low, **kind)

    def rounding(self) -> float:
        """Bytes of the operands of a product and of its gradient, while they are rounded."""
        rounded = (m for m in self.matmuls() if m.format)
        return max((m.m * m.k + m.k * m.n + m.m * m.n for m in rounded), default=0)

    def attention(self) -> Iterable[Attention]:
        _, parts, _ = self.work.exchange  # a script's exchange is not counted
        for a in self.part.attended:
            yield Attention(
                batch=a.batch,
                heads=-(-a.heads // self.factor(a.module)),
                queries=a.queries,
                keys=a.keys
                * (1 if parts > 1 or a.linear else self.work.plan.mesh.ranks_of(AxisRole.SEQUENCE)),
                head_dim=a.head_dim,
                masked=parts > 1 or a.masked,
                linear=a.linear,
                causal=a.causal,
            )

    def moved_bytes(self) -> float:
        """Bytes that memory-bound kernels of one rank read and write."""
        return sum(self._rank_bytes(*one) for one in self.part.bytes_moved.items())

    def _rank_bytes(self, module: str, size: int) -> float:
        """Bytes on one rank; for expert-parallel modules, on the rank with the most tokens."""
        most = self.work.imbalance if self._dispatch(module) else 1.0
        return size / self.factor(module) * most

    def saved_bytes(self) -> float:
        """Bytes that autograd saves for backward on one rank."""
        if table := self.work.tables.get(self.name):
            return table.saved
        return sum(self._rank_bytes(*one) for one in self.part.bytes_saved.items())

    def outputs(self, inside: Iterable[Holding]) -> float:
        """`Layer.outputs`."""
        weights = (h for h in inside if h.modules.module.kind == "norm")
        norms = sum(h.count for h in weights if h.parameter.name == "weight")
        products = sum(m.m * m.n * m.count for m in self.matmuls()) * self.work.width
        return products + self.part.boundary / self.stream * (norms // len(self.part.like))

    def routed_row_bytes(self) -> float:
        """Bytes of the rows of experts that exist beside what they keep: three copies in backward,
        the gradient as it comes, in the order of experts, and times their weights; and, where rows
        are sent, one more of those received. Of rows in chunks those of two, one of which is sent.
        """
        first = next((p for p in self.part.products if p.divided), None)
        if first is None:
            return 0.0
        way = self._dispatch(first.module)
        chunks = max(1.0, way.chunks / 2) if way else 1.0
        if way and way.dispatch == ALL_REDUCE:
            share, copies = self.experts, 3
        else:
            share, copies = (self.senders, 4) if way else (1, 3)
        most = self.work.imbalance if way else 1.0
        return copies * first.m / share * first.k * self.work.width * most / chunks

    def replayed_for_weights(
        self, rule: Checkpoint | None, inside: Iterable[Holding]
    ) -> tuple[float, float]:
        """`Layer.again` and `Layer.left`.

        torch computes the gradients of weights one by one, in the order of parameters, and
        recomputes the layer for each. Of a recomputation stays what no gradient has taken: each
        takes the largest tensor that its module keeps. What is behind the last module goes with it.
        """
        order: dict[str, int] = {}
        for h in inside:
            if h.parameter.trainable and (name := below(h.modules, self.name)) is not None:
                many = len(h.parameter.shape) > 1 and h.parameter.name != "weight"
                order[name] = order.get(name, 0) + 1 if many else order.get(name, 1)
        last = next((s.module for s in self.part.saved[::-1] if s.module in order), None)
        if rule is None or last is None:
            return 0.0, 0.0
        taken = {
            name: self._rank_bytes(name, size) for name, size in self.part.largest_saved.items()
        }
        kept = self.selective(rule) if rule.save else self.part.boundary / self.stream
        dropped = max(0.0, self.saved_bytes() - kept)
        before = [*order][: [*order].index(last)]
        times = order[last] + sum(order[name] for name in before)
        again = max(0.0, dropped - sum(taken.get(name, 0.0) for name in before))
        left = max(0.0, dropped - sum(taken.get(name, 0.0) for name in [*order][:-1]))
        return times * again, sum(order.values()) * left

    def selective(self, rule: Checkpoint | None) -> float:
        """Bytes that selective checkpointing keeps: the layer's input, and outputs of the matmuls
        and the attention that the rule saves.
        """
        again = self.recomputed_work(rule)
        if rule is None or again is None:
            return 0.0
        if table := self.work.tables.get(self.name):
            return table.keeping(rule.save).size
        width = self.work.width

        def products(some: Iterable[Matmul]) -> float:
            return sum(p.m * p.n * p.count * width for p in some)

        def outputs(some: Iterable[Attention]) -> float:
            return sum(a.batch * a.heads * a.queries * (a.head_dim * width + 4) for a in some)

        size = self.part.boundary / self.stream + products(self.matmuls()) - products(again[0])
        return size + outputs(self.attention()) - outputs(again[1])

    def away(self, rule: Checkpoint | None) -> float:
        """Bytes of results that a list of calls keeps in the host's memory."""
        table = self.work.tables.get(self.name)
        return table.keeping(rule.save).away if rule is not None and table is not None else 0.0

    def recomputed_work(
        self, rule: Checkpoint | None
    ) -> tuple[tuple[Matmul, ...], tuple[Attention, ...]] | None:
        """The matmuls and the attention that a rule with a list of saved calls recomputes."""
        if rule is None or not rule.save:
            return None
        every = {s.name: s.every for s in rule.save}
        matmuls, attention = self.matmuls(), tuple(self.attention())
        if table := self.work.tables.get(self.name):
            runs = [*table.running(rule.save)]
            products = [run for run, call in runs if call.flops and call.op != "attention"]
            attends = [run for run, call in runs if call.op == "attention"]
            if (len(products), len(attends)) == (len(matmuls), len(attention)):
                return (*compress(matmuls, products),), (*compress(attention, attends),)
        if n := every.get("matmul"):
            matmuls = tuple(m for i, m in enumerate(matmuls) if i % n)
        return matmuls, () if "attention" in every else attention

    def keeps_wide_loss(self, logits: int) -> bool:
        """Whether the loss keeps float32 for each logit, but perhaps those of the last token."""
        return any(s.size > 3 * logits for s in self.part.saved if not s.module)

    def stops_early(self) -> bool:
        """Whether torch's checkpoint ends before the last product, whose input is the last tensor
        that backward needs.
        """
        products, saved = self.part.products, self.part.saved
        if self.work.stack.kernels.repeats_last or not (products and saved):
            return False
        return not products[-1].divided and products[-1].module == saved[-1].module

    def moved_again(self, rule: Checkpoint | None) -> float:
        """`Layer.moved_again`."""
        table = self.work.tables.get(self.name)
        if rule is None or not rule.save or table is None:
            return 1.0
        runs = [(run, call.moved) for run, call in table.running(rule.save) if not call.flops]
        every = sum(moved for _, moved in runs)
        return sum(moved for run, moved in runs if run) / every if every else 1.0

    def collectives(self, stage: int | None) -> dict[During, tuple[Collective, ...]]:
        """Collectives of each pass of a micro-batch, of all axes that divide activations, as
        `planc.lowering.collectives` has them; bytes that it does not know count as those of the
        layer's input.

        Args:
            stage: of what is outside all layers; None for what sends nothing.
        """
        found: dict[During, tuple[Collective, ...]] = dict.fromkeys(During, ())
        for sent, group in self.work.sent:
            if times := self._times(sent, stage):
                size: float = self.part.boundary if sent.size is None else sent.size
                if self.divided and sent.kind == EXCHANGE and group.name == self.work.divides:
                    size *= self.work.imbalance
                one = Collective(kind=sent.kind, size=size, group=group, count=times)
                found[sent.during] += (self._dispatch_of(one),)
        return found

    def _dispatch_of(self, one: Collective) -> Collective:
        """A collective of experts, as the kernels of the stack dispatch tokens."""
        config, to_experts = self.work.step.config, one.group.name == self.work.divides
        if one.kind != EXCHANGE or not to_experts or not self.work.stack.kernels.dispatch_once:
            return one
        groups = integer_of(config, "n_group") or 1
        nodes = (integer_of(config, "topk_group") or 0) if groups > 1 else 0
        return replace(one, choices=self.work.step.chosen or 0, nodes=nodes)

    def _times(self, sent: Sent, stage: int | None) -> int:
        """The number of such collectives of one layer for one micro-batch."""
        step = self.work.step
        if sent.modules is None:  # blocks with attention exchange keys and values of other shards
            attends = self.part.attended or any(p.count > 1 for p in self.part.products)
            blocks = attending(step)[1] if self.part.at and attends else 0
            own = [
                op
                for op in step.lowered.find_ops(Attend)
                if below(op.modules, self.name) is not None
            ]
            blocks -= sum(len(op.modules) for op in step.lowered.find_ops(Attend))
            return sent.times // (step.passes * blocks) if blocks > 0 and not own else 0
        name = below(sent.modules, self.name)
        if name is None or (not self.name and self.work.stage_of(name) != stage):
            return 0
        depth = len(self.name.split(".")) if self.name else 0
        layers = prod(len(s) for s in sent.modules.path[:depth] if isinstance(s, Indices))
        return sent.times // (step.passes * layers)


_LOGIT_COPIES = Hook[Callable[[Plan, int, int], float]]("estimate", "logit_copies")
_GRADIENT_PASSES = Hook[Callable[[Plan], float]]("estimate", "gradient_passes")


def logit_copies(plan: Plan, logits: int, width: int, transient: float) -> float:
    """Bytes of logits beside what is kept for backward; `width` of an activation's element,
    `transient` copies of whole logits.
    """
    if not plan.loss_rules:
        return logits * transient
    return sum(copies(plan, logits, width) for copies in _LOGIT_COPIES.find_all(plan.sections))


def gradient_passes(plan: Plan) -> float:
    """Bytes that the head's forward pass moves for the gradient of its weight, if a section
    computes it there.
    """
    return sum(passes(plan) for passes in _GRADIENT_PASSES.find_all(plan.sections))


def unsplit(holding: Holding) -> int:
    """`Layer.unsplit` of the modules of a parameter."""
    if holding.modules.module.kind != "embedding" or not holding.parameter.trainable:
        return 0
    return (holding.parameter.shape[0] - holding.local[0]) * prod(holding.local[1:]) * holding.count


def recompute_of(rule: Checkpoint | None) -> Recompute:
    """The kind of recomputation of a rule's layers."""
    if rule is None:
        return Recompute.NONE
    return Recompute.SELECTIVE if rule.save else Recompute.FULL
