"""A step of a lowered plan: its batch, which its ranks split, and the sizes that what it sends is
made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from math import gcd, prod
from typing import Any

from planc.checks.queries import divisors
from planc.diagnostics.diagnostic import Sink
from planc.ir.nodes import Mesh
from planc.lowering.backward import EVERYWHERE, Backward
from planc.model.block_arguments import BlockArguments
from planc.model.config import chosen_experts, integer_of
from planc.model.facts import DTYPE_BYTES, Modules
from planc.ops.base import AxisRole, Op
from planc.ops.fsdp import FullyShard
from planc.ops.layouts import Layout, Partial, Replicate, Shard
from planc.ops.lowered import Lowered
from planc.ops.pipeline import TERMS

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
EXCHANGE, SEND = "all-to-all", "send"


class During(StrEnum):
    """When a collective runs: in a forward pass, in what a backward pass repeats of it for a
    checkpoint, in the rest of a backward pass, or once in a step.
    """

    FORWARD = "forward"
    REPEATED = "repeated"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Equal collectives of one operation, of a step, on a rank that runs it.

    Args:
        word: the name of the operation.
        where: what it works on.
        kind: of the collective.
        axes: of its group.
        times: in a step.
        size: bytes of the whole tensor: gathered, before it is scattered, reduced, exchanged or
            sent; the mean over the ranks where a router decides. None where they depend on the
            batch, which is not given, or are not known.
        during: the pass that it is part of; a step where that is not known.
        modules: whose forward and backward passes send it, if some do.
        among: how many ranks of its axis are in a group, and how far apart; None for all of them.
    """

    word: str
    where: str
    kind: str
    axes: tuple[str, ...]
    times: int
    size: int | None
    during: During = During.STEP
    modules: Modules | None = None
    among: tuple[int, int] | None = None

    def ranks(self, lowered: Lowered) -> int:
        """The number of ranks in a group."""
        return self.among[0] if self.among else lowered.axis_size(*self.axes)


def again(collectives: Iterator[Sent], share: Fraction) -> Iterator[Sent]:
    """Collectives, and the share of those of forward passes that backward repeats."""
    for sent in collectives:
        yield sent
        if sent.during is During.FORWARD:
            yield replace(sent, times=int(sent.times * share), during=During.REPEATED)


@dataclass(frozen=True)
class Step:
    """The plan and the batch of a step.

    Args:
        config: of the model.
        batch, sequence: rows of all ranks, and tokens of a row; None where they are not given.
        micro_batches: passes of a rank that accumulate gradients.
        computes: the dtype of activations; None for that of FSDP's units.
        arguments: of blocks, where the stages of a pipeline send more than hidden states.
        backward: how far backward passes reach; everywhere where that is not known.
    """

    lowered: Lowered
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    sequence: int | None = None
    micro_batches: int = 1
    computes: str | None = None
    backward: Backward = EVERYWHERE
    arguments: BlockArguments | None = None

    @cached_property
    def passes(self) -> int:
        """The forward passes of a stage in a step."""
        op = self.lowered.pipeline
        return self.micro_batches * (op.microbatches if op else 1)

    def reductions(self, *units: FullyShard) -> int:
        """The number of gradient reductions of these FSDP units, or of any. Shards are reduced in
        each pass of a plan without stages, replicated gradients at the end of the step.
        """
        reduced_units = units or self.lowered.fsdp_units
        once = self.lowered.pipeline or not any(self.wide(op.shard) for op in reduced_units)
        return 1 if once else self.micro_batches

    @cached_property
    def ranks(self) -> int:
        """The ranks that read different rows."""
        return self.lowered.axis_size(*self.lowered.data)

    @cached_property
    def runs(self) -> int:
        """The runs of tokens that a rank has of each sequence."""
        return prod(op.runs for op in self.lowered.contexts)

    @property
    def divisors(self) -> tuple[int, int]:
        """The divisors of the rows of a step and of the tokens of a row."""
        return self.ranks * self.passes, self.lowered.sequence_parts * self.runs

    @cached_property
    def tokens(self) -> int | None:
        """The tokens of a pass on one rank."""
        if self.batch is None or self.sequence is None:
            return None
        return self.batch // self.divisors[0] * (self.sequence // self.lowered.sequence_parts)

    @cached_property
    def width(self) -> int:
        """Bytes of a number of an activation."""
        if self.computes:
            return DTYPE_BYTES[self.computes]
        units = self.lowered.fsdp_units
        given = next((op.param for op in units if op.param), None)
        stored = (p.dtype for op in units for m in op.members for p in parameters_of(m))
        return DTYPE_BYTES[given or next(stored, "float32")]

    @cached_property
    def hidden(self) -> int | None:
        """The features of the hidden states."""
        return self.number("hidden_size", "n_embd", "d_model")

    @property
    def chosen(self) -> int | None:
        """The experts of a token."""
        return chosen_experts(self.config)

    def number(self, *names: str) -> int | None:
        """The first of some settings of the model that is a number."""
        return integer_of(self.config, *names)

    def size(self, *features: int | None) -> int | None:
        """Bytes of an activation with these features for each token of a pass."""
        factors = (self.tokens, *features)
        return None if None in factors else self.width * prod(n for n in factors if n is not None)

    @property
    def knows_trained(self) -> bool:
        return bool(self.backward.owners)

    @property
    def skips_blocks(self) -> bool:
        return self.backward.skips

    def has_styles(self, modules: Modules) -> bool:
        styles: list[Op] = [op for op in self.lowered.ops if op.ROLE is AxisRole.TENSOR]
        return any(op.about.overlap(modules) for op in styles if self.wide(op.split_axes))

    def wide(self, axes: tuple[str, ...]) -> bool:
        return self.lowered.axis_size(*axes) > 1


def require_divisible(step: Step, mesh: Mesh | None, sink: Sink) -> None:
    """Reports unless each rank gets whole rows, and equal runs of the tokens of a row.

    Args:
        step: what it has no number of is not judged.
        mesh: of the plan; None for a lowered plan, which has no lines to point at.
        sink: receives PL702.
    """
    (rows, tokens), parts = step.divisors, step.passes
    for size, what, among, role, more in (
        (step.batch, "rows", rows, AxisRole.DATA, (parts, "micro-batches")),
        (step.sequence, "tokens of a row", tokens, AxisRole.SEQUENCE, (step.runs, "runs of each")),
    ):
        if size is None or size % among == 0:
            continue
        axes = mesh.of_role(role) if mesh else ()
        wide = [a for a in axes if a.size > 1] or axes[:1]
        named = " * ".join(f"{a.name} {a.size}" for a in axes)
        named += f" * {more[0]} {more[1]}" if axes and more[0] > 1 else ""
        sink.error(
            "PL702",
            f"{size} {what} cannot be split among {among}" + (f" ({named})" if named else ""),
            *(axis.label for axis in wide),
            help=_fitting(step, role) + f"use a multiple of {among}, or another mesh",
        )


def _fitting(step: Step, role: AxisRole) -> str:
    """The setting with which ranks can split the batch, as the start of a help; else nothing."""
    if role is AxisRole.SEQUENCE:
        fits = (step.sequence or 0) % step.lowered.sequence_parts == 0
        return "`balance = none` fits; or " if fits and step.runs > 1 else ""
    count, pipeline = (step.batch or 0) // step.ranks, step.lowered.pipeline
    if (step.batch or 0) % step.ranks or step.passes == 1:
        return ""
    if pipeline is None:
        return f"`--micro-batches {gcd(count, step.micro_batches)}` fits; or "
    if pipeline.rank_passes or count % step.micro_batches:
        return ""
    terms, ranks = TERMS[pipeline.schedule], step.lowered.axis_size(pipeline.axis)
    fitting = [
        n
        for n in divisors(count // step.micro_batches)
        if terms.is_filled(n, pipeline.stages) and terms.rounds(n, ranks)
    ]
    nearest = min(fitting, key=lambda n: (abs(n - pipeline.microbatches), -n), default=None)
    return f"`microbatches = {nearest}` fits; or " if nearest else ""


def gather_template(word: str, modules: Modules, axes: tuple[str, ...]) -> Sent:
    """An all-gather of an operation in the forward pass of modules, without times and size."""
    return Sent(
        word=word,
        where=str(modules),
        kind=GATHER,
        axes=axes,
        times=0,
        size=None,
        during=During.FORWARD,
        modules=modules,
    )


def collective_kind(before: Layout, after: Layout) -> str | None:
    """The collective that brings a layout into another; None where each rank has what it needs."""
    match before, after:
        case Partial(), Replicate():
            return REDUCE
        case Partial(), Shard():
            return SCATTER
        case Shard(), Replicate():
            return GATHER
        case Shard(one), Shard(two) if one != two and {one, two} != {-1, 2}:
            return EXCHANGE
    return None


def parameters_of(modules: Modules) -> Iterator[Any]:
    """The parameters of a module and of all inside."""
    waiting = [modules.module]
    while waiting:
        module = waiting.pop()
        yield from module.parameters
        waiting += [child.module for child in module.children]
