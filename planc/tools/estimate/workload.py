"""The work of a training step on each rank: the input of the estimate.

All sizes are those of one rank: after tensor, context and expert parallelism, for one micro-batch.
FSDP's share is taken off later, since it changes what is held and sent but not what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from planc.diagnostics.source import Span
from planc.ops.pipeline import stages_of_rank
from planc.tools.estimate.formats import NumberFormat

Ways = tuple[tuple[float, float], ...]
"""Bytes from each stage but the last one to the next, and back."""


class Recompute(StrEnum):
    """The tensors that the forward pass of a layer saves: all, all but those of the attention's
    core, its input.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Sharding(StrEnum):
    """The tensors that data-parallel ranks shard: none, the optimizer state (ZeRO-1), or all
    (ZeRO-3, FSDP).
    """

    REPLICATED = "replicated"
    OPTIMIZER = "optimizer"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate.

    Args:
        name: of the axis.
        size: the number of ranks.
        stride: the distance of neighbors in the order of ranks, which fill node after node.
    """

    name: str
    size: int
    stride: int = 1

    def in_node(self, ranks_per_node: int) -> int:
        """The number of the group's ranks in one node."""
        return max(1, min(self.size, ranks_per_node // self.stride))

    def crosses(self, ranks_per_node: int) -> bool:
        """Whether the group has ranks in several nodes."""
        return self.in_node(ranks_per_node) < self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """`count` products of an (m, k) and a (k, n) matrix.

    Args:
        format: of rounded operands; None for the dtype of activations.
        grouped: whether one kernel computes all `count`, as of experts.
        joined: whether it is one kernel with the product before, whose input it has.
    """

    m: int
    n: int
    k: int
    count: int = 1
    format: NumberFormat | None = None
    grouped: bool = False
    joined: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention of `heads` query heads over whole sequences, or a kernel of as many FLOPs.

    Args:
        batch: sequences.
        heads: of queries.
        queries, keys: positions.
        head_dim: of a head.
        fused: whether a flash kernel computes it, or matmuls and a softmax in fp32.
        masked: whether it computes the whole square: with a mask, or for all positions.
        linear: whether it is a kernel of linear attention, all of whose FLOPs are computed.
        causal: whether half of the square would do, whatever the kernel computes.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    fused: bool = True
    masked: bool = False
    linear: bool = False
    causal: bool = True

    @property
    def flops(self) -> float:
        """FLOPs without the causal saving, as MFU counts them; a causal kernel computes half."""
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.head_dim

    @property
    def kernel_flops(self) -> float:
        """FLOPs that its kernel computes."""
        return self.flops if self.masked or self.linear else self.flops / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`count` collectives of a kind of `planc.lowering.step`.

    Args:
        size: bytes of the full tensor.
        choices: the experts of a token, for a dispatch that sends it once to each node; 0 for an
            all-to-all with a copy for each expert.
        nodes: the nodes that the experts of a token are on at most; 0 for any number.
    """

    kind: str
    size: float
    group: Group
    count: int = 1
    choices: int = 0
    nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer on one rank, for one micro-batch.

    Args:
        name: of its kind.
        parameters: elements on one rank before FSDP's sharding.
        apart: those of them that `Workload.apart` shards, in units of their own.
        frozen: those of them that do not train.
        hosted: bytes of those of the optimizer's states that the plan offloads, likewise.
        states: bytes of the optimizer's states before FSDP's sharding, where the plan says how it
            is stepped.
        stored: bytes of all of them in a checkpoint.
        unsplit: elements of other ranks that gradients have until they are reduced over the model's
            axes: for an embedding that is split by its vocabulary, `embedding_dense_backward` gives
            a partial sum of the whole gradient.
        tied: those of parameters that a lookup and a product of this rank share.
        root: elements that train of the unit of the whole model, if its parameters are in it.
        last: those of the last parameter of its unit.
        matmuls, attention: of one forward.
        uneven: FLOPs of it that other ranks do not have, whose experts get fewer tokens.
        moved: bytes that memory-bound kernels of one forward read and write.
        kernels: the number of kernels that one forward launches, collectives apart.
        kept: bytes that autograd keeps for backward.
        kept_selective: those of them that stay under selective recomputing.
        outputs: bytes of what its products and norms give: where a schedule computes the gradients
            of weights later, those of their outputs wait for it.
        scored: those bytes of `kept` that the loss itself keeps.
        again: bytes that are recomputed and kept while a later pass computes the gradients of a
            checkpointed layer's weights.
        left: the same once it has all of them, where something behind the layer trains too.
        boundary: bytes of the layer's input, which is all that full recomputing keeps.
        transient: bytes that exist during its forward or backward only, such as copies of logits.
        forward, backward: collectives of the model's axes in each pass.
        repeated: those that backward sends again under full recomputing, None for all of forward.
        lookup: whether its parameters are looked up (an embedding), so no FLOPs are counted.
        loss: whether it computes the loss, so that backward frees first what it keeps.
        at_once: whether the loss computes its gradients in the forward pass, as one in chunks does.
        resident: the share of equal layers whose gathered parameters stay from forward on, such as
            the last one's (`reshard = except_last`) and those of replicas.
        recompute: what the forward pass keeps of it.
        stops_early: whether a recomputation ends before its last product.
        offloaded: whether what it keeps until backward is copied to the host's memory and back.
        away: bytes that are copied there beside what it keeps.
        width: bytes of an element of its units while they are gathered, 0 for `compute`.
        narrow: elements of its largest unit that are gathered in one byte each.
        replayed: the matmuls and the attention that selective recomputing computes again, None for
            none: kernels that are bound by memory in proportion to what is dropped.
        moved_again: the share of its memory-bound kernels that selective recomputing runs again.
        origin: the plan's line that made it a unit, if any.
    """

    name: str
    parameters: int
    apart: int = 0
    frozen: int = 0
    states: int = 0
    hosted: int = 0
    stored: int = 0
    unsplit: int = 0
    tied: int = 0
    root: int = 0
    last: int = 0
    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[Attention, ...] = ()
    uneven: float = 0
    moved: float = 0
    kernels: int = 0
    kept: float = 0
    kept_selective: float = 0
    outputs: float = 0
    scored: float = 0
    again: float = 0
    left: float = 0
    boundary: float = 0
    transient: float = 0
    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    repeated: tuple[Collective, ...] | None = None
    lookup: bool = False
    loss: bool = False
    at_once: bool = False
    resident: float = 0
    recompute: Recompute = Recompute.NONE
    stops_early: bool = False
    offloaded: bool = False
    away: float = 0
    width: int = 0
    narrow: int = 0
    replayed: tuple[tuple[Matmul, ...], tuple[Attention, ...]] | None = None
    moved_again: float = 1.0
    origin: Span | None = None

    @property
    def flops(self) -> float:
        """FLOPs of one forward, in the mean of all ranks."""
        every = sum(m.flops for m in self.matmuls) + sum(a.flops for a in self.attention)
        return every - self.uneven

    def gathered_bytes(self, compute: int) -> int:
        """Bytes of its largest unit while it is gathered; `compute` of an element of most units."""
        width = self.width or compute
        most = max(self.parameters - self.apart, self.apart)
        return most * width - self.narrow * (width - 1)

    @property
    def stays(self) -> float:
        """Bytes of activations that wait for backward, on the accelerator or the host."""
        if self.recompute is Recompute.FULL and not self.lookup and not self.loss:
            return self.boundary
        return self.kept_selective if self.recompute is Recompute.SELECTIVE else self.kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementSizes:
    """Bytes of an element: parameters at rest, in compute, gradients as reduced, optimizer state.

    Args:
        states: of the optimizer's states together (8 for Adam in fp32).
    """

    rest: int = 4
    compute: int = 2
    reduce: int = 4
    states: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The work of a plan's optimizer on one pipeline rank, besides passes over its states.

    Args:
        name: its algorithms.
        exchanged: what a rank exchanges.
        turned: shapes of matrices that a rank orthogonalizes: rows, columns, iterations, whether in
            float32 rather than in 16 bits, and how many.
        held: bytes that a step holds for a moment.
        moved: bytes that rounding states to 8 bits moves.
        origin: the first line of the section.
    """

    name: str
    exchanged: tuple[Collective, ...] = ()
    turned: tuple[tuple[int, int, int, bool, float], ...] = ()
    held: float = 0
    moved: float = 0
    origin: Span | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A step of one model on one mesh.

    Args:
        stages: of the pipeline, each with its layers in order, as (layer, number of equal ones).
        data: the group that gradients are averaged over; it shards too, as `sharding` says.
        replicate: the group of replicas of a sharded group (HSDP), of size 1 without.
        apart: groups that shard and replicate some parameters in place of both, as experts.
        tensor, context, experts, pipeline: the other groups.
        micro_batches: in one run of the schedule.
        runs: of the schedule in a step.
        rank_passes: the passes of each rank, where the plan has its own.
        chunks: stages that one rank holds (interleaved schedules).
        staged: whether units stay gathered after a backward pass and gradients whole until all
            passes are done, as `run.forward_backward` has it in a pipeline.
        messages: bytes that each stage but the last one sends to the next for a micro-batch, and
            gets back: what it sent, it keeps until then.
        world: the number of ranks, 0 for the product of the groups.
        tokens: of the step, over all ranks.
        origin: the section of the plan that places parameters on ranks, if any.
        offload: whether shards, their gradients and the optimizer's states are in the host's
            memory, where the optimizer steps them.
        updates: of the plan's optimizer section, by the place in the pipeline; none without one.
    """

    stages: tuple[tuple[tuple[Layer, int], ...], ...]
    data: Group
    replicate: Group = Group(name="replicate", size=1)
    apart: tuple[Group, Group] | None = None
    tensor: Group = Group(name="tensor", size=1)
    context: Group = Group(name="context", size=1)
    experts: Group = Group(name="experts", size=1)
    pipeline: Group = Group(name="pipeline", size=1)
    micro_batches: int = 1
    runs: int = 1
    schedule: str = "1f1b"
    rank_passes: tuple[str, ...] = ()
    chunks: int = 1
    staged: bool = False
    messages: Ways = ()
    world: int = 0
    tokens: int
    sharding: Sharding = Sharding.FULL
    precision: ElementSizes = ElementSizes()
    offload: bool = False
    updates: tuple[Update, ...] = ()
    origin: Span | None = None

    @property
    def reduced_once(self) -> bool:
        """Whether gradients stay whole until all passes are done: they do also without shards."""
        return self.staged or self.replicate.size > self.data.size == 1

    @property
    def ranks(self) -> int:
        groups = (self.data, self.replicate, self.tensor, self.context, self.pipeline)
        return self.world or prod(group.size for group in groups)

    def map_layers(self, change: Callable[[Layer, int], Layer]) -> Workload:
        """The step with what `change` makes of each layer and the number of equal ones."""
        stages = (tuple((change(x, n), n) for x, n in stage) for stage in self.stages)
        return replace(self, stages=tuple(stages))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank of the pipeline."""
        return stages_of_rank(self.schedule, rank, self.pipeline.size, len(self.stages))

    @property
    def model_flops(self) -> float:
        """FLOPs of one step over all ranks: 3 times those of forward, nothing recomputed."""
        return self._flops(sum(x.flops * n for stage in self.stages for x, n in stage))

    @property
    def causal_flops(self) -> float:
        """`model_flops` with the causal half of attention, as NVIDIA's tables do."""
        layers = [(x, n) for stage in self.stages for x, n in stage]
        causal = ((a, n) for x, n in layers for a in x.attention if a.causal and not a.linear)
        less = sum(n * a.flops / 2 for a, n in causal)
        return self.model_flops - self._flops(less)

    def _flops(self, forward: float) -> float:
        """FLOPs of a step, from those of a forward pass of the ranks of a pipeline."""
        return 3 * forward * self.ranks / self.pipeline.size * self.micro_batches * self.runs

    def __post_init__(self) -> None:
        assert len(self.stages) == self.pipeline.size * self.chunks
