"""Seconds of a training step, by what they are spent on.

A layer's pass takes as long as the slower of the accelerator and the CPU that launches for it.
The pipeline's schedule is simulated; the gradients' reduction and the optimizer follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planc.lowering.schedules import simulate_schedule
from planc.lowering.step import GATHER, REDUCE, SCATTER
from planc.tools.estimate import kernels
from planc.tools.estimate.profiles import Hardware, Stack
from planc.tools.estimate.workload import (
    Collective,
    Group,
    Layer,
    Recompute,
    Sharding,
    Ways,
    Workload,
)


class Spent(NamedTuple):
    """Seconds of one pass, or of a step, by kind."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    tensor_collectives: float = 0.0
    context_collectives: float = 0.0
    expert_collectives: float = 0.0
    data_collectives: float = 0.0
    host_copies: float = 0.0
    launch: float = 0.0
    pipeline_sends: float = 0.0
    pipeline_bubble: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def compute(self) -> float:
        """The seconds of one rank alone, whose collectives take no time."""
        done = (self.matmul, self.attention, self.memory_bound, self.launch, self.optimizer)
        return sum(done)

    def plus(self, other: Spent, times: float) -> Spent:
        return Spent(*(one + times * more for one, more in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """
    Args:
        seconds: of a step.
        spent: what the busiest rank of the pipeline spends them on.
        tokens_per_second: of one rank.
        mfu: model FLOPs over the data sheet's; attention counts as a whole square, as in PaLM's
            paper, and nothing recomputed counts.
        causal_mfu: the same with the causal half of attention, as in NVIDIA's tables.
        bottleneck: the largest part, in words, and the largest that is no matmul or attention.
    """

    seconds: float
    spent: Spent
    tokens_per_second: float
    mfu: float
    causal_mfu: float
    bottleneck: str


class Passes:
    """Forward and backward of layers, for one workload on one machine."""

    def __init__(self, work: Workload, hardware: Hardware, stack: Stack) -> None:
        self.work, self.hardware, self.stack = work, hardware, stack
        crosses = work.pipeline.crosses(hardware.ranks_per_node)
        self.stall = stack.stall_us * 1e-6 * work.tensor.size if crosses else 0.0
        """The delay of a collective of the tensor group: each of its ranks may be late, and all
        wait for each."""

    def launch(self, layer: Layer, sent: tuple[Collective, ...], passes: int) -> float:
        """CPU seconds; backward launches about twice the kernels of forward."""
        count = sum(c.count for c in sent)
        full = self.work.sharding is Sharding.FULL
        each = layer.kernels + (self.stack.launches_a_unit if full else 0)
        launched = passes * each + self.stack.launches_a_collective * count
        seconds = launched * self.hardware.launch_us * 1e-6
        if host := self.host_ms(layer):
            seconds = passes / 3 * host * 1e-3
        waited = sum(kernels.latency(c, self.hardware) for c in sent)
        return max(seconds, waited) + count * self.stall

    def host_ms(self, layer: Layer) -> float:
        """Milliseconds of the host for both passes of a layer, if the kernels' profile has them."""
        if layer.loss or layer.lookup:
            return 0.0
        host = self.stack.kernels
        experts = max((m.count for m in layer.matmuls if m.grouped), default=0)
        return host.expert_layer_ms + experts * host.expert_ms if experts else host.layer_ms

    def _pass_times(
        self,
        layer: Layer,
        parts: tuple[float, float, float],
        sent: tuple[Collective, ...],
        collectives: tuple[float, float],
        passes: int,
    ) -> Spent:
        """The seconds of a pass.

        Args:
            collectives: seconds of data-parallel ones, and of those whose groups cross nodes.
        """
        data, across = collectives
        stack, launch = self.stack, self.launch(layer, sent, passes)
        matmul, attention, memory = parts
        each = dict.fromkeys((self.work.tensor, self.work.context, self.work.experts), 0.0)
        for c in sent:
            of = c.group if c.group in each else self.work.tensor
            each[of] += kernels.collective(c, self.hardware)
        whole = sum(each.values())
        exposed = max(whole * (1 - stack.tensor_overlap), whole - matmul)
        share = {group: exposed * size / whole if whole else 0.0 for group, size in each.items()}
        computed = matmul + attention + memory + exposed
        left = max(0.0, data - stack.data_overlap * computed)
        left += stack.data_contention * min(across, data - left)
        return Spent(
            matmul=matmul,
            attention=attention,
            memory_bound=memory,
            tensor_collectives=share[self.work.tensor],
            context_collectives=share[self.work.context],
            expert_collectives=share[self.work.experts],
            data_collectives=left,
            host_copies=(copied := self.activation_copy_seconds(layer)),
            launch=max(0.0, launch - computed - left - copied),
        )

    def forward(self, layer: Layer) -> Spent:
        parts = kernels.forward(layer, self.hardware, self.stack)
        gathers = self.forward_gathers(layer)
        data, across = gathers * self.gather(layer), self.across_nodes(layer, gathers, 0)
        return self._pass_times(layer, parts, layer.forward, (data, across), 1)

    def forward_gathers(self, layer: Layer) -> float:
        """The all-gathers of a layer's units in the forward pass of a micro-batch, in the mean."""
        work = self.work
        if not work.staged:
            return 1.0
        # units stay gathered after a backward, or from the first forward on
        before = min(work.micro_batches, work.pipeline.size)
        return (layer.resident + (1 - layer.resident) * before) / work.micro_batches

    def backward(self, layer: Layer) -> Spent:
        work, stack = self.work, self.stack
        matmul, attention, memory = kernels.backward(layer, self.hardware, self.stack)
        sent, passes = layer.backward, 2
        if repeated := self.recomputation(layer):
            more = kernels.forward(repeated, self.hardware, self.stack)
            matmul, attention, memory = matmul + more[0], attention + more[1], memory + more[2]
            again = layer.forward if layer.repeated is None else layer.repeated
            sent, passes = (*sent, *again), 3
        elif layer.recompute is Recompute.SELECTIVE and layer.kept:
            share = 1 - layer.kept_selective / layer.kept
            memory += share * kernels.forward(layer, self.hardware, self.stack)[2]
        size = stack.parameter_passes * layer.parameters + self.copied_bytes(layer)
        memory += kernels.memory_seconds(size, 0, self.hardware)
        gathers, reductions = 1 - layer.resident, 0.0 if work.reduced_once else 1.0
        data = gathers * self.gather(layer) + reductions * self.reduce(layer)
        across = self.across_nodes(layer, gathers, reductions)
        return self._pass_times(layer, (matmul, attention, memory), sent, (data, across), passes)

    def copied_bytes(self, layer: Layer) -> float:
        """Bytes that FSDP's copies of a layer's parameters and gradients move, besides its
        collectives, in both passes of a micro-batch.
        """
        work, stack = self.work, self.stack
        if work.sharding is not Sharding.FULL:
            return 0.0
        gathers = self.forward_gathers(layer) + 1 - layer.resident
        reductions = 1 / work.micro_batches if work.reduced_once else 1.0
        size = gathers * stack.gather_passes + reductions * stack.reduce_passes
        size += (1 - reductions) * stack.accumulation_passes
        shards = sum(elements / shard.size for elements, shard, _ in self._parts(layer))
        return layer.parameters * size + reductions * stack.shard_passes * shards

    def recomputation(self, layer: Layer) -> Layer | None:
        """The recomputation in the backward of a checkpointed layer; None if it repeats no
        product.
        """
        if layer.recompute is Recompute.FULL and not layer.lookup and not layer.loss:
            return replace(layer, matmuls=layer.matmuls[: -1 if layer.stops_early else None])
        if layer.recompute is Recompute.SELECTIVE and layer.replayed is not None:
            share = layer.moved_again
            matmuls, attention = layer.replayed
            few = replace(layer, moved=share * layer.moved, kernels=round(share * layer.kernels))
            if layer.stops_early and matmuls and matmuls[-1] == layer.matmuls[-1]:
                matmuls = matmuls[:-1]
            return replace(few, matmuls=matmuls, attention=attention)
        return None

    def _parts(self, layer: Layer) -> Iterator[tuple[int, Group, Group]]:
        """The elements of a layer's units, and the groups that shard and replicate them."""
        work = self.work
        yield layer.parameters - layer.apart, work.data, work.replicate
        if work.apart and layer.apart:
            yield layer.apart, *work.apart

    def gather(self, layer: Layer) -> float:
        """Seconds of FSDP's all-gather before each pass of a micro-batch."""
        if self.work.sharding is not Sharding.FULL:
            return 0.0
        return sum(seconds for _, seconds in self._gathers(layer)) + self.offload_seconds(layer)

    def reduce(self, layer: Layer) -> float:
        """Seconds of FSDP's reduce-scatter after a backward, and the all-reduce over replicas."""
        if self.work.sharding is not Sharding.FULL:
            return 0.0
        return sum(seconds for _, seconds in self._reductions(layer)) + self.offload_seconds(layer)

    def _gathers(self, layer: Layer) -> Iterator[tuple[Group, float]]:
        """Seconds of each all-gather of a layer's units, with its group."""
        width = layer.width or self.work.precision.compute
        less = (layer.narrow * (width - 1), 0)  # what comes in 8 bits, of the first part
        for (elements, shard, _), narrow in zip(self._parts(layer), less, strict=False):
            yield shard, self._collective(GATHER, elements * width - narrow, shard)

    def _reductions(self, layer: Layer) -> Iterator[tuple[Group, float]]:
        """Seconds of each reduction of a layer's gradients, with its group."""
        for elements, shard, replicate in self._parts(layer):
            size = elements * self.work.precision.reduce
            yield shard, self._collective(SCATTER, size, shard)
            yield replicate, self._collective(REDUCE, size / shard.size, replicate)

    def across_nodes(self, layer: Layer, gathers: float, reductions: float) -> float:
        """Seconds of FSDP's collectives of a layer whose groups cross nodes."""
        if self.work.sharding is not Sharding.FULL:
            return 0.0
        every = (
            *((group, gathers * seconds) for group, seconds in self._gathers(layer)),
            *((group, reductions * seconds) for group, seconds in self._reductions(layer)),
        )
        nodes = self.hardware.ranks_per_node
        return sum(seconds for group, seconds in every if group.crosses(nodes))

    def offload_seconds(self, layer: Layer) -> float:
        """Seconds to copy a layer's shards from the host's memory, or their gradients to it."""
        parts = sum(n / shard.size for n, shard, _ in self._parts(layer))
        return self._copy_seconds(parts * self.work.precision.rest) if self.work.offload else 0.0

    def activation_copy_seconds(self, layer: Layer) -> float:
        """Seconds to copy offloaded activations; on the compute stream, so not overlapped."""
        return self._copy_seconds(layer.stays if layer.offloaded else layer.away)

    def _copy_seconds(self, size: float) -> float:
        return size / (self.hardware.host_gb_s * 1e9)

    def _collective(self, kind: str, size: float, group: Group) -> float:
        return kernels.collective(Collective(kind=kind, size=size, group=group), self.hardware)

    def after(self, layer: Layer) -> float:
        """Seconds of what follows the last backward, one message a layer: replicas' all-reduce, or
        ZeRO-1's reduce-scatter and the gather of the stepped parameters.
        """
        work = self.work
        if work.sharding is Sharding.FULL:
            return self.reduce(layer) if work.reduced_once else 0.0
        size = layer.parameters * work.precision.reduce
        if work.sharding is Sharding.REPLICATED:
            return self._collective(REDUCE, size, work.data)
        gathered = layer.parameters * work.precision.compute
        return self._collective(SCATTER, size, work.data) + self._collective(
            GATHER, gathered, work.data
        )

    def optimizer(self, parameters: float) -> float:
        """Seconds to step a rank's share, and of the passes over all it holds (norms, zeroing)."""
        work = self.work
        share = 1 if work.sharding is Sharding.REPLICATED else work.data.size
        whole = parameters if work.sharding is not Sharding.FULL else parameters / share
        size = self.stack.optimizer_passes * work.precision.rest * parameters / share + 8 * whole
        if work.offload:
            return size / (self.hardware.host_memory_gb_s * 1e9)
        return kernels.memory_seconds(size, 0, self.hardware)

    def fetch_seconds(self, hosted: float) -> float:
        """Seconds to copy states from the host's memory and back, before they are sharded."""
        whole = self.work.sharding is Sharding.REPLICATED
        return self._copy_seconds(2 * hosted / (1 if whole else self.work.data.size))

    def update(self, place: int) -> float:
        """Seconds of what the plan's optimizer sends, orthogonalizes and rounds."""
        if not self.work.updates:
            return 0.0
        update, hardware = self.work.updates[place], self.hardware
        sent = sum(kernels.collective(c, hardware) for c in update.exchanged)
        each = [
            (steps * kernels.orthogonal(rows, columns, hardware, full=full), count)
            for rows, columns, steps, full, count in update.turned
        ]
        shared = sum(seconds * count for seconds, count in each)
        longest = max((seconds for seconds, _ in each), default=0.0)  # an owner has whole ones
        return sent + max(shared, longest) + kernels.memory_seconds(update.moved, 0, hardware)


def step_time(work: Workload, hardware: Hardware, stack: Stack) -> StepTime:
    """The time of a step and what it is spent on."""
    passes = Passes(work, hardware, stack)
    forward = [_sum((passes.forward(x), n) for x, n in stage) for stage in work.stages]
    backward = [_sum((passes.backward(x), n) for x, n in stage) for stage in work.stages]
    ranks, count = work.pipeline.size, work.micro_batches
    plan = simulate_schedule(
        work.schedule,
        ranks=ranks,
        chunks=work.chunks,
        micro_batches=count,
        forward=[s.total for s in forward],
        backward=[s.total for s in backward],
        hops=hops(work, hardware),
        rows=work.rank_passes,
    )
    last = [sum(backward[stage].total for stage in work.of_rank(r)) for r in range(ranks)]
    exposed, optimizer = _after(passes, last)
    worst = max(range(ranks), key=lambda r: plan.busy[r])
    own, runs = work.of_rank(worst), work.runs
    spent = _sum((part[stage], count * runs) for part in (forward, backward) for stage in own)
    sends = max(0.0, plan.busy[worst] * runs - spent.total)
    spent = spent._replace(
        data_collectives=spent.data_collectives + exposed,
        optimizer=optimizer,
        pipeline_sends=sends,
        pipeline_bubble=(plan.seconds - plan.busy[worst]) * runs,
    )
    seconds = plan.seconds * runs + exposed + optimizer
    available = seconds * work.ranks * hardware.peak_tflops * 1e12
    return StepTime(
        seconds=seconds,
        spent=spent,
        tokens_per_second=work.tokens / seconds / work.ranks,
        mfu=work.model_flops / available,
        causal_mfu=work.causal_flops / available,
        bottleneck=_bottleneck(spent, work, hardware),
    )


def _after(passes: Passes, last: Sequence[float]) -> tuple[float, float]:
    """Seconds of collectives after the last backward, and of the optimizer, on the slowest rank.

    Args:
        last: seconds of each rank's last backward.
    """
    work, ranks = passes.work, passes.work.pipeline.size
    # buckets are all-reduced during the last backward; ZeRO-1 scatters after it, or during it too
    hidden = Sharding.OPTIMIZER if passes.stack.overlaps_scatter else Sharding.REPLICATED
    overlap = passes.stack.data_overlap if work.sharding in (Sharding.REPLICATED, hidden) else 0.0
    exposed, held, updates = [0.0], [0.0], [0.0]
    for rank in range(ranks):
        layers = [pair for stage in work.of_rank(rank) for pair in work.stages[stage]]
        exposed.append(sum(passes.after(x) * n for x, n in layers) - overlap * last[rank])
        # what fewer ranks shard counts as often as it is more on each
        times = work.data.size / work.apart[0].size - 1 if work.apart else 0.0
        held.append(sum((x.parameters - x.frozen + times * x.apart) * n for x, n in layers))
        hosted = sum(x.hosted * n for x, n in layers)
        updates.append(passes.update(rank) + passes.fetch_seconds(hosted))
    return max(exposed), passes.optimizer(max(held)) + max(updates)


def _sum(parts: Iterable[tuple[Spent, int]]) -> Spent:
    total = Spent()
    for part, times in parts:
        total = total.plus(part, times)
    return total


def hops(work: Workload, hardware: Hardware) -> Ways:
    """Seconds that each message between two stages takes, as `Workload.messages`."""

    def seconds(size: float) -> float:
        return kernels.point_to_point(size, work.pipeline, hardware)

    return tuple((seconds(there), seconds(back)) for there, back in work.messages)


def _bottleneck(spent: Spent, work: Workload, hardware: Hardware) -> str:
    parts = spent._asdict()
    groups = {
        "tensor_collectives": work.tensor,
        "context_collectives": work.context,
        "expert_collectives": work.experts,
        "data_collectives": work.data,
    }

    def share_text(name: str) -> str:
        crosses = name in groups and groups[name].crosses(hardware.ranks_per_node)
        where = (" across nodes" if crosses else " in a node") * (name in groups)
        return f"{name.replace('_', ' ')}{where} {100 * parts[name] / spent.total:.0f} %"

    others = [name for name in parts if name not in ("matmul", "attention")]
    most, other = max(parts, key=parts.__getitem__), max(others, key=parts.__getitem__)
    return share_text(most) if most == other else f"{share_text(most)}, then {share_text(other)}"
