"""How a plan's tensor-parallel rules divide what one layer computes, keeps and sends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from planc.estimate.counted import Part
from planc.estimate.workload import Attention, Collective, Kind, Matmul
from planc.model.facts import DTYPE_BYTES, Modules
from planc.model.indices import Indices
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import AxisRole
from planc.ops.expert_parallel import ALL_REDUCE
from planc.ops.layouts import Replicate, Shard
from planc.ops.styles import Colwise, Experts, Parameters, Rowwise, Sequence
from planc.plan.experts import dividing

if TYPE_CHECKING:
    from planc.estimate.from_plan import PlanWork

Passes = tuple[tuple[Collective, ...], tuple[Collective, ...]]
"""The collectives of a forward and of a backward pass."""

_SPLITS = (Colwise, Rowwise, Experts, Parameters)


class Split:
    """How the plan's tensor-parallel rules split what one part computes and keeps."""

    def __init__(self, work: PlanWork, part: Part) -> None:
        self.work, self.part = work, part
        self.factors: dict[str, int] = {}
        self.name = part.like[0]
        rules = ((self._below(r.modules), r) for r in work.rules)
        self.ruled = {name: r for name, r in rules if name is not None}
        self.ranks = work.size(AxisRole.TENSOR)
        experts = work.plan.mesh.experts
        self.experts = experts.ranks.size if experts else 1
        found = ((self._below(r.modules), r.dispatch) for r in dividing(work.plan))
        self.divided = {name: way for name, way in found if name is not None}
        """How tokens come to the experts of modules that ranks divide."""
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
        if way := self._dispatch(module):  # ranks with equal tokens send a part each
            return self.experts if way == ALL_REDUCE else self.ranks
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

    def _dispatch(self, module: str) -> str | None:
        """How tokens come to the divided experts that a module is or is inside of."""
        inside = (way for name, way in self.divided.items() if f"{module}.".startswith(f"{name}."))
        return next(inside, None)

    def matmuls(self) -> Iterable[Matmul]:
        for p in self.part.products:
            style = self._style(p.module)
            m, n, k, count = p.m, p.n, p.k, p.count
            if way := self._dispatch(p.module):
                count = -(-count // self.experts)
                m = m if way == ALL_REDUCE else -(-m * self.experts // self.ranks)
            elif isinstance(style, Colwise):
                n = -(-n // self.ranks)
            elif isinstance(style, Rowwise):
                k = -(-k // self.ranks)
            elif isinstance(style, Experts | Parameters):
                n, k = (-(-n // self.ranks), k) if n >= k else (n, -(-k // self.ranks))
            elif count > 1:
                count = -(-count // self.factor(p.module))
            yield Matmul(m=m, n=n, k=k, count=count)

    def attention(self) -> Iterable[Attention]:
        _, parts = self.work.exchange  # a script's exchange is not counted
        for a in self.part.attended:
            batch, heads, queries, keys, dim = a.shape
            yield Attention(
                batch=batch,
                heads=-(-heads // self.factor(a.module)),
                queries=queries,
                keys=keys * (1 if parts > 1 else self.work.size(AxisRole.SEQUENCE)),
                head_dim=dim,
                masked=parts > 1,
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

    def collectives(self) -> Passes:
        """Those of each pass, over all axes."""
        some = (self._of_tensors(), self._of_context(), self._of_experts())
        return sum((x[0] for x in some), ()), sum((x[1] for x in some), ())

    def _of_context(self) -> Passes:
        """What attention gathers of other parts of the sequence, or exchanges with them."""
        axes, (way, _) = self.work.plan.mesh.of_role(AxisRole.SEQUENCE), self.work.exchange
        group = self.work.group(*(a.name for a in axes))
        kinds = [Kind.ALL_GATHER, Kind.REDUCE_SCATTER]
        if way == "ulysses":
            kinds = [Kind.ALL_TO_ALL] * 2
        sizes = [e.size / self.factor(e.module) for e in self.part.exchanged]
        one, two = (
            tuple(Collective(kind=kind, size=size, group=group) for size in sizes) for kind in kinds
        )
        return one, two

    def _of_experts(self) -> Passes:
        """Tokens go to the ranks of their experts and back, or all ranks' results are summed."""
        mesh, tensor = self.work.plan.mesh, self.work.plan.mesh.of_role(AxisRole.TENSOR)
        width = DTYPE_BYTES.get(self.work.compute_dtype, 4)
        rows: dict[str, tuple[str, float]] = {}
        for p in self.part.products:
            if way := self._dispatch(p.module):
                rows.setdefault(p.module, (way, p.m * p.count * p.k * width))
        if not rows or mesh.experts is None:
            return (), ()
        group, alike = (
            self.work.group(mesh.experts.ranks.name),
            self.work.group(*(a.name for a in tensor)),
        )
        found: list[Collective] = []
        for way, size in rows.values():
            if way == ALL_REDUCE:
                found.append(Collective(kind=Kind.ALL_REDUCE, size=self.part.boundary, group=group))
                continue
            found.append(
                Collective(kind=Kind.ALL_TO_ALL, size=size / self.ranks, group=group, count=2)
            )
            if alike.size > 1:
                found.append(Collective(kind=Kind.ALL_GATHER, size=self.part.boundary, group=alike))
        return tuple(found), tuple(found)

    def _of_tensors(self) -> Passes:
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
