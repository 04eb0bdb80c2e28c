"""A collective or a message of one rank, with its axes of the mesh and the plan's line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from operator import itemgetter
from typing import Any

from planc.ops import phrases
from planc.ops.base import Op
from planc.ops.lowered import Lowered
from planc.ops.registry import units_of

WAIT = "wait"


def kind_text(kind: str) -> str:
    """`all-gather` of `all_gather`, `receive` of `recv`."""
    return kind.replace("_", "-").replace("recv", "receive")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """
    Args:
        rank: that calls.
        number: of the call in the step, from 0.
        kind: `all_reduce`, `send`, ..., or `wait` for a message.
        ranks: of the group, in its order.
        group: its name, by which it is told from others of the same ranks.
        numel, dtype: of the tensor that the rank gives; of a message, of what is sent.
        reduces: `sum`, `avg`, ...; of a broadcast, the rank that it is from.
        uneven: whether the rank gives each other one another size.
        module: in whose forward, recomputation or backward it is; empty for the training loop.
        during: `forward`, `recomputation`, `backward`, `clipping`, `optimizer`; empty for the loop.
        unit: modules that FSDP gathers or reduces, separated by commas.
        peer: the rank at the other end of a message; -1 without one.
        batch: of messages that are started at once; 0 for a message alone.
        work: of a message, which its wait has too; 0 without one.
        axes: of the mesh that the group lies along; empty for others.
        op: the operation of the plan that makes it; None where no line does.
    """

    rank: int
    number: int
    kind: str
    ranks: tuple[int, ...] = ()
    group: str = ""
    numel: int = 0
    dtype: str = ""
    reduces: str = ""
    uneven: bool = False
    module: str = ""
    during: str = ""
    unit: str = ""
    peer: int = -1
    batch: int = 0
    work: int = 0
    axes: tuple[str, ...] = ()
    op: Op | None = None

    @property
    def what(self) -> str:
        """`all-gather of 4,096 bf16`, `send of 128 fp32 to rank 2`."""
        if self.kind == WAIT:
            return "a wait for a message"
        way = {"send": " to rank", "recv": " from rank"}.get(self.kind)
        reduces = f" ({self.reduces})" * bool(self.reduces)
        size = f" of {self.numel:,} {phrases.SHORT.get(self.dtype, self.dtype)}"
        end = f"{way} {self.peer}" if way else ""
        return f"{kind_text(self.kind)}{reduces}{size * bool(self.numel)}{end}"

    @property
    def gathers_unit(self) -> bool:
        """Whether the call gathers or reduces a unit of FSDP."""
        return bool(self.unit and self.op and units_of(self.op))

    @property
    def over(self) -> str:
        return phrases.axes(self.axes) or f"ranks {', '.join(map(str, self.ranks))}"

    @property
    def where(self) -> str:
        """`backward of model.layers.3`, `forward, fsdp of lm_head`, `clipping`, `the loop`."""
        at = f"{self.during} of {self.module}" if self.module else self.during
        of = f"{self.op.WORD} of {self.unit}" if self.op and self.gathers_unit else ""
        return ", ".join(filter(None, (at, of))) or "the loop" * (self.op is None)

    @property
    def line(self) -> str:
        """The plan's operation and its line; empty where no line makes the call."""
        return "" if self.op is None else f"{self.op.WORD} {self.op.place}".rstrip()

    @property
    def location(self) -> str:
        """The call's place in the step, and the plan's line."""
        return "; ".join(filter(None, (self.where, self.line)))

    @property
    def text(self) -> str:
        return f"{self.what} over {self.over} ({self.location})"


class Groups:
    """The axes of the mesh that groups of ranks lie along."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.known: dict[frozenset[int], tuple[str, ...]] = {}
        axes = [(a.name, a.size, lowered.stride(a.name)) for a in lowered.axes if a.size > 1]
        for subset in _subsets(axes):
            self._add(subset, axes)
        if experts := lowered.experts:
            inner = [a for a in axes if a[0] in experts.axes]
            ranks = [*_along(inner)]
            for name, size, stride in (
                (experts.ranks.name, experts.ranks.size, 1),
                (experts.rest.name, experts.rest.size, experts.ranks.size),
            ):
                self._add_experts(name, size, stride, ranks, [a for a in axes if a not in inner])

    def _add(self, subset: Sequence[Any], axes: Sequence[Any]) -> None:
        names = tuple(name for name, _, _ in subset)
        for start in _along([axis for axis in axes if axis not in subset]):
            self.known.setdefault(frozenset(start + at for at in _along(subset)), names)

    def _add_experts(
        self, name: str, size: int, stride: int, ranks: list[int], others: Sequence[Any]
    ) -> None:
        if size == 1:
            return
        for start, first in product(_along(others), range(len(ranks))):
            if first // stride % size == 0:
                group = frozenset(start + ranks[first + at * stride] for at in range(size))
                self.known.setdefault(group, (name,))

    def axes(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return self.known.get(frozenset(ranks), ())


def _subsets(axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    for count in range(1, len(axes) + 1):
        yield from combinations(axes, count)


def _along(axes: Sequence[Any]) -> Iterator[int]:
    """The numbers of the ranks along some axes, of those with place 0 on the others."""
    for place in product(*(range(size) for _, size, _ in axes)):
        yield sum(at * stride for at, (_, _, stride) in zip(place, axes, strict=True))


def pipeline_rank_of(lowered: Lowered, rank: int) -> int:
    """The pipeline rank of a global rank; 0 without a pipeline."""
    axis = lowered.pipeline.axis if lowered.pipeline else ""
    return rank // lowered.stride(axis) % lowered.axis_size(axis) if axis else 0


def calls(
    noted: Iterable[Mapping[str, Any]], rank: int, lowered: Lowered, groups: Groups
) -> Iterator[RankCall]:
    """The calls of a rank in a step, as `planc.runtime.collectives` notes them."""
    ops = lowered.stages[pipeline_rank_of(lowered, rank)].ops
    for number, fields in enumerate(noted):
        ranks = tuple(fields.get("ranks", ()))
        call = RankCall(
            **{**fields, "ranks": ranks}, rank=rank, number=number, axes=groups.axes(ranks)
        )
        yield _with_op(call, ops)


def _with_op(call: RankCall, ops: Sequence[Op]) -> RankCall:
    """The call with the operation whose claim on it is the strongest."""
    if call.kind == WAIT:
        return call
    claims = [(claim, op) for op in ops if (claim := op.claims(call)) is not None]
    return replace(call, op=max(claims, key=itemgetter(0))[1]) if claims else call
