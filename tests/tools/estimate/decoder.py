"""The work of a decoder-only transformer, from its dims alone.

`planc estimate` describes a model by what its modules keep and compute; this describes one by
formula, for tables of runs of other software.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from planc.lowering.step import GATHER, REDUCE, SCATTER
from planc.tools.estimate.profiles import Stack
from planc.tools.estimate.workload import (
    Attention,
    Collective,
    ElementSizes,
    Group,
    Layer,
    Matmul,
    Recompute,
    Sharding,
    Workload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The dims of a model.

    Args:
        key_value_heads: 0 for as many as heads.
        gated: whether the MLP has a gate (three matrices) or not (two).
        tied: whether the output projection is the embedding.
        positions: learned positions, 0 for rotary ones.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    key_value_heads: int = 0
    gated: bool = True
    tied: bool = False
    positions: int = 0

    @property
    def key_values(self) -> int:
        """The width of keys."""
        return self.hidden * (self.key_value_heads or self.heads) // self.heads

    @property
    def block(self) -> int:
        """Parameters of a block."""
        ffn = (3 if self.gated else 2) * self.hidden * self.ffn
        return 2 * self.hidden * (self.hidden + self.key_values) + ffn + 2 * self.hidden

    @property
    def parameters(self) -> int:
        tables = (1 if self.tied else 2) * self.vocabulary + self.positions
        return self.layers * self.block + tables * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a decoder is trained: sizes of the mesh, of the batch, and what is kept."""

    data: int = 1
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    sequence: int = 4096
    schedule: str = "1f1b"
    chunks: int = 1
    sharding: Sharding = Sharding.FULL
    recompute: Recompute = Recompute.NONE
    precision: ElementSizes = field(default_factory=ElementSizes)
    sequence_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What a stack's own layers launch, keep and move; planc counts a model's layers instead.

    Args:
        fused_attention: whether a flash kernel computes attention, or matmuls and a softmax.
        gathers_inputs_again: whether backward gathers a column layer's input that forward dropped.
        kernels_a_layer: operators of one block's forward.
        norm_passes, rotation_passes, score_passes: how often such kernels read or write an element.
        loss_kept, loss_moved: bytes a logit that stay until backward, and that are read and
            written.
    """

    fused_attention: bool
    gathers_inputs_again: bool
    kernels_a_layer: int
    norm_passes: float
    rotation_passes: float
    score_passes: float
    loss_kept: float = 4
    loss_moved: float


KERNELS = {
    # 7,022 kernels of 16 layers measured, three passes and FSDP's copies; DTensor keeps the
    # gathered input of a column layer; transformers' RMSNorm in fp32: 0.53 ms for 64 MiB measured,
    # 4 + 8 passes; its rotate_half: two products, a negated copy, a concatenation, a sum; eager
    # attention: scores, mask, softmax in fp32, cast, dropout; its loss: cast, log_softmax in fp32,
    # its gradient, cast back (measured: 17.8 ms for 8,192 x 128,256)
    "torch": Kernels(
        fused_attention=True,
        gathers_inputs_again=False,
        kernels_a_layer=60,
        norm_passes=12,
        rotation_passes=8,
        score_passes=12,
        loss_moved=24,
    ),
    # the versions of the A100 tables: matmuls and a fused scaled masked softmax; sequence
    # parallelism keeps the split input (Korthikanti et al., 2022); operators of
    # ParallelTransformerLayer.forward; fused LayerNorm: read and write; scores written, softmax
    # read and written, dropout with its mask, read by a matmul; vocab_parallel_cross_entropy keeps
    # the softmax in fp32: cast, exponential, sum, division, gradient, cast back
    "megatron": Kernels(
        fused_attention=False,
        gathers_inputs_again=True,
        kernels_a_layer=35,
        norm_passes=2,
        rotation_passes=2,
        score_passes=8,
        loss_moved=20,
    ),
    # tp_recompute_allgather; operators of LlamaDecoderLayer.forward with flash attention;
    # flash-attn's Triton RMSNorm: read and write; sharded_cross_entropy keeps the softmax in fp32:
    # cast, maximum, exponential, sum, division, gradient, cast back
    "nanotron": Kernels(
        fused_attention=True,
        gathers_inputs_again=True,
        kernels_a_layer=30,
        norm_passes=2,
        rotation_passes=4,
        score_passes=0,
        loss_moved=24,
    ),
}


def workload(model: Decoder, run: Run, stack: Stack, kernels: Kernels | None = None) -> Workload:
    """The work of a step; a dim that the mesh does not divide is rounded up.

    Args:
        kernels: by default those of the stack.
    """
    tp, cp = run.tensor, run.context
    context = Group(name="context", size=cp, stride=tp)
    tensor = Group(name="tensor", size=tp)
    data = Group(name="data", size=run.data, stride=tp * cp)
    replicate = Group(name="replicate", size=run.replicate, stride=tp * cp * run.data)
    outer = tp * cp * run.data * run.replicate
    pieces = _Pieces(model, run, stack, kernels or KERNELS[stack.name], tensor, context)
    block, head = pieces.block(), pieces.head()
    stages = tuple(
        (
            *(((pieces.embedding(), 1),) if first else ()),
            *(((block, n),) if n else ()),
            *(((head, 1),) if last else ()),
        )
        for first, n, last in split(model, run.pipeline * run.chunks)
    )
    boundary = max(layer.boundary for stage in stages for layer, _ in stage)
    return Workload(
        stages=stages,
        messages=((boundary, boundary),) * (len(stages) - 1),
        data=data,
        replicate=replicate,
        tensor=tensor,
        context=context,
        pipeline=Group(name="pipeline", size=run.pipeline, stride=outer),
        micro_batches=run.micro_batches,
        schedule=run.schedule,
        chunks=run.chunks,
        tokens=run.sequence * run.micro_batch * run.micro_batches * run.data * run.replicate,
        sharding=run.sharding,
        precision=run.precision,
    )


def split(model: Decoder, stages: int) -> list[tuple[bool, int, bool]]:
    """Each stage as (has the embedding, number of blocks, has the head), by compute.

    A stage takes blocks until the sum of their matmul parameters passes its share, and the head
    counts by its own (nanotron `models/base.py`, `build_model`; others balance alike by hand).
    """
    costs = [0.0] + [float(model.block)] * model.layers + [float(model.vocabulary * model.hidden)]
    total, stage, so_far = sum(costs), 0, 0.0
    found = [[0, 0, 0] for _ in range(stages)]
    for i, cost in enumerate(costs):
        kind = 0 if i == 0 else 2 if i == len(costs) - 1 else 1
        found[stage][kind] += 1
        so_far += cost
        if so_far > total * (stage + 1) / stages * (1 + 1e-9):
            stage += 1
    return [(bool(a), b, bool(c)) for a, b, c in found]


class _Pieces:
    """The layers of a decoder on one rank."""

    def __init__(
        self,
        model: Decoder,
        run: Run,
        stack: Stack,
        kernels: Kernels,
        tensor: Group,
        context: Group,
    ) -> None:
        self.model, self.run, self.stack, self.kernels = model, run, stack, kernels
        self.tensor, self.context = tensor, context
        self.tokens = run.micro_batch * run.sequence // context.size
        self.width = run.precision.compute
        self.stream = self.tokens * model.hidden * self.width
        """Bytes of the residual stream of a micro-batch."""

    def _split(self, size: int) -> int:
        return -(-size // self.tensor.size)

    @property
    def _sequence(self) -> int:
        """Over how many ranks norms and the residual stream are split."""
        split = self.run.sequence_parallel and self.tensor.size > 1
        return self.tensor.size if split else 1

    def _collectives(self) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """Of tensor parallelism: two all-reduces a pass, or as many gathers and scatters.

        With sequence parallelism, backward gathers each column layer's input again.
        """
        if self.tensor.size == 1:
            return (), ()

        def of(kind: str, count: int) -> Collective:
            return Collective(kind=kind, size=self.stream, group=self.tensor, count=count)

        if not self.run.sequence_parallel:
            both = (of(REDUCE, 2),)
            return both, both
        again = 2 if self.kernels.gathers_inputs_again else 0
        forward = (of(GATHER, 2), of(SCATTER, 2))
        backward = (of(GATHER, 2 + again), of(SCATTER, 2))
        return forward, backward

    def _around(self) -> tuple[Collective, ...]:
        """Of context parallelism: keys and values of the whole sequence."""
        if self.context.size == 1:
            return ()
        size = 2.0 * self.tokens * self.context.size * self.model.key_values * self.width
        whole = size / self.tensor.size
        return (Collective(kind=GATHER, size=whole, group=self.context),)

    def block(self) -> Layer:
        model, t, h = self.model, self.tokens, self.model.hidden
        kv, ffn = self._split(model.key_values), self._split(model.ffn)
        inner = self._split(h)
        gates = 2 if model.gated else 1
        forward, backward = self._collectives()
        kept, core = self._kept(inner, kv, ffn)
        heads = self._split(model.heads)
        sequence = self.run.sequence // self.context.size
        return Layer(
            name="block",
            parameters=inner * h * 2 + 2 * kv * h + (gates + 1) * ffn * h + 2 * h,
            matmuls=(
                Matmul(m=t, n=inner + 2 * kv, k=h),
                Matmul(m=t, n=h, k=inner),
                Matmul(m=t, n=gates * ffn, k=h),
                Matmul(m=t, n=h, k=ffn),
            ),
            attention=(
                Attention(
                    batch=self.run.micro_batch,
                    heads=heads,
                    queries=sequence,
                    keys=self.run.sequence,
                    head_dim=h // model.heads,
                    fused=self.kernels.fused_attention,
                ),
            ),
            moved=self._moved(inner, kv, ffn),
            kernels=self.kernels.kernels_a_layer,
            kept=kept,
            kept_selective=kept - core,
            boundary=self.stream / self._sequence,
            transient=4 * t * ffn * self.width + (4.0 * self.stream if self._sequence > 1 else 0),
            forward=(*forward, *self._around()),
            backward=(*backward, *self._around(), *self._around()),
            recompute=self.run.recompute,
        )

    def _kept(self, inner: int, kv: int, ffn: int) -> tuple[float, float]:
        """Bytes kept: two norms' inputs and outputs, the fused projection's output, rotated
        queries and keys, the attention's output, and the MLP's projections, activation and product.
        """
        model, t, w = self.model, self.tokens, self.width
        norms = 4 * model.hidden / self._sequence
        rotated = (inner + kv) if not model.positions else 0
        attention = inner + 2 * kv + rotated + inner
        mlp = 4 * ffn if model.gated else 2 * ffn
        core = 0.0
        if not self.kernels.fused_attention:  # scores in fp32, their softmax and dropout's mask
            scores = self.run.micro_batch * self._split(model.heads) * self.run.sequence**2
            core = scores / self.context.size * (2 * w + 1)
        return t * w * (norms + attention + mlp) + core, core

    def _moved(self, inner: int, kv: int, ffn: int) -> float:
        """Bytes of the memory-bound kernels of a forward: two norms, two residual sums (read and
        written, as often as the stack's kernels do), the rotation, the activation and product.
        """
        t, w, model = self.tokens, self.width, self.model
        stream = (2 * self.kernels.norm_passes + 2 * 3) * model.hidden / self._sequence
        rotation = 0 if model.positions else self.kernels.rotation_passes * (inner + kv)
        activation = (5 if model.gated else 2) * ffn
        scores = 0.0
        if not self.kernels.fused_attention:
            squares = self.run.micro_batch * self._split(model.heads) * self.run.sequence**2
            scores = squares / self.context.size * w * self.kernels.score_passes
        return t * w * (stream + rotation + activation) + scores

    def embedding(self) -> Layer:
        model = self.model
        rows = self._split(model.vocabulary) + model.positions
        forward, backward = self._collectives()
        return Layer(
            name="embedding",
            parameters=rows * model.hidden,
            moved=2 * self.stream,
            kernels=4,
            boundary=self.stream / self._sequence,
            kept=self.tokens * 8,
            forward=_once(forward, SCATTER),
            backward=_once(backward, GATHER),
            lookup=True,
        )

    def head(self) -> Layer:
        """The last norm, the output projection and the loss."""
        model, t, stack = self.model, self.tokens, self.stack
        rows = self._split(model.vocabulary)
        logits = float(t * rows)
        forward, backward = self._collectives()
        own = 0 if model.tied and self.run.pipeline * self.run.chunks == 1 else rows * model.hidden
        return Layer(
            name="head and loss",
            parameters=own + model.hidden,
            matmuls=(Matmul(m=t, n=rows, k=model.hidden),),
            moved=self.kernels.loss_moved * logits + 4 * self.stream / self._sequence,
            kernels=12,
            kept=2 * self.stream / self._sequence + self.kernels.loss_kept * logits,
            transient=stack.loss_transient * logits,
            boundary=self.stream / self._sequence,
            forward=_once(forward, GATHER),
            backward=_once(backward, SCATTER),
            loss=True,
            resident=True,
        )


def _once(collectives: tuple[Collective, ...], kind: str) -> tuple[Collective, ...]:
    """One of a block's collectives of the kind; one all-reduce without sequence parallelism."""
    kinds = (kind, REDUCE)
    return tuple(replace(c, count=1) for c in collectives if c.kind in kinds)
