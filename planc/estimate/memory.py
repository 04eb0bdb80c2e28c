"""Bytes that a rank of each pipeline stage holds, by item and by moment of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planc.estimate.pipeline import in_flight, order
from planc.estimate.profiles import Hardware, Stack
from planc.estimate.workload import Layer, Recompute, Sharding, Workload
from planc.source import Span

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What some bytes are.

    Args:
        name: parameters, gradients, the activations of a kind of layer.
        size: bytes.
        how: how the number comes about.
        origin: the plan's line that decides it, if one does.
    """

    name: str
    size: float
    how: str
    origin: Span | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What exists at one time of a step."""

    name: str
    items: tuple[Item, ...]

    @property
    def size(self) -> float:
        return sum(item.size for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of the ranks of one pipeline rank.

    Args:
        rank: in the pipeline.
        moments: candidates for the peak, in the order of a step.
    """

    rank: int
    moments: tuple[Moment, ...]

    @property
    def largest(self) -> Moment:
        return max(self.moments, key=lambda m: m.size)

    @property
    def peak(self) -> float:
        """Bytes that the allocator has handed out at most."""
        return self.largest.size


def memory(work: Workload, stack: Stack, ahead: int) -> list[RankMemory]:
    """The memory of each pipeline rank.

    Args:
        ahead: how many micro-batches in flight hold no tensors for a communication stream; 0 where
            the accelerator sets the pace, since such a tensor lives until the stream passed it.
    """
    ranks = work.pipeline.size
    return [_Rank(work, stack, rank, ahead).memory() for rank in range(ranks)]


def usable(hardware: Hardware, stack: Stack) -> float:
    """Bytes that the allocator can hand out before it fails."""
    return (hardware.memory_gib - hardware.context_gib) * stack.memory_margin * GIB


class _Rank:
    def __init__(self, work: Workload, stack: Stack, rank: int, ahead: int) -> None:
        self.work, self.stack, self.rank, self.ahead = work, stack, rank, ahead
        self.stages = work.stages[rank :: work.pipeline.size]
        self.layers = [pair for stage in self.stages for pair in stage]
        self.elements = sum(layer.parameters * n for layer, n in self.layers)
        self.trained = self.elements - sum(layer.frozen * n for layer, n in self.layers)
        self.shard = work.data.size if work.sharding is Sharding.FULL else 1
        self.steps = 1 if work.sharding is Sharding.REPLICATED else work.data.size

    def memory(self) -> RankMemory:
        held = (*self.rest(), self.gradients(), *self.compute_gradients(), *self.tied())
        keeps = self.work.micro_batches > 1 or self.stack.keeps_compute_gradients
        early = held if keeps else self.rest()
        kept, resident = tuple(self.activations()), tuple(self.resident())
        moments = (
            Moment(name="loss", items=(*early, *kept, *resident, *self.transient(loss=True))),
            Moment(
                name="backward of a layer",
                items=(
                    *early,
                    *self.activations(loss=False),
                    *resident,
                    *self.gathered(),
                    *self.recomputed(),
                    *self.transient(loss=False),
                ),
            ),
            Moment(name="end of backward", items=(*held, *self.reduced())),
            Moment(name="optimizer step", items=(*held, *self.stepped())),
        )
        return RankMemory(rank=self.rank, moments=moments)

    def rest(self) -> tuple[Item, ...]:
        precision, elements = self.work.precision, self.elements
        share = f" / {self.shard} ranks" if self.shard > 1 else ""
        steps = f" / {self.steps} ranks" if self.steps > 1 else ""
        state = precision.master + precision.states
        return (
            Item(
                name="parameters",
                size=elements / self.shard * precision.rest,
                how=f"{elements:,} elements x {precision.rest} bytes{share}",
            ),
            Item(
                name="optimizer state",
                size=self.trained / self.steps * state,
                how=f"{self.trained:,} elements x {state} bytes{steps}",
            ),
        )

    def gradients(self) -> Item:
        width = self.work.precision.reduce if self.shard == 1 else self.work.precision.rest
        share = f" / {self.shard} ranks" if self.shard > 1 else ""
        return Item(
            name="gradients",
            size=self.trained / self.shard * width,
            how=f"{self.trained:,} elements x {width} bytes{share}",
        )

    def compute_gradients(self) -> tuple[Item, ...]:
        if not self.stack.keeps_compute_gradients:
            return ()
        width = self.work.precision.compute
        return (
            Item(
                name="gradients before accumulation",
                size=self.trained * width,
                how=f"{self.trained:,} elements x {width} bytes",
            ),
        )

    def tied(self) -> Iterable[Item]:
        """The copy of tied parameters' gradients that the first and the last stage sum."""
        work, last = self.work, self.work.pipeline.size - 1
        if work.tied and last and self.rank in (0, last):
            yield Item(
                name="tied gradients being summed",
                size=work.tied * work.precision.reduce,
                how=f"{work.tied:,} elements x {work.precision.reduce} bytes",
            )

    def kept(self, layer: Layer) -> float:
        """Bytes of one layer's activations for one micro-batch."""
        recompute = layer.recompute or self.work.recompute
        if recompute is Recompute.FULL and not layer.lookup and not layer.loss:
            return layer.boundary
        return layer.kept_selective if recompute is Recompute.SELECTIVE else layer.kept

    def activations(self, *, loss: bool = True) -> Iterable[Item]:
        """At the fullest moment of the schedule, by kind of layer; what the loss keeps is freed
        before the layers' backward.
        """
        work = self.work
        passes = order(
            work.schedule, self.rank, work.pipeline.size, work.chunks, work.micro_batches
        )
        each = [sum(self.kept(x) * n for x, n in stage) for stage in self.stages]
        most = max(
            in_flight(passes, work.chunks),
            key=lambda held: sum(h * size for h, size in zip(held, each, strict=True)),
        )
        for stage, held in zip(self.stages, most, strict=True):
            for layer, n in stage:
                if layer.loss and not loss:
                    continue
                if size := self.kept(layer) * n * held:
                    yield Item(
                        name=f"activations of {layer.name}",
                        size=size,
                        how=f"{self.kept(layer) / 2**20:,.1f} MiB x {n} layers x {held} in flight",
                        origin=layer.origin,
                    )
                    yield from self.lingering(layer, n, held)

    def lingering(self, layer: Layer, n: int, held: int) -> Iterable[Item]:
        """Gathered inputs, which a communication stream holds until the accelerator passed them.

        Where the accelerator waits for the host or the network, it passes them at once: of a
        pipeline's micro-batches only the first, which the host sends ahead, keep theirs.
        """
        lives = max(0, held - self.ahead)
        if size := layer.gathered * n * lives:
            yield Item(
                name=f"gathered inputs of {layer.name}",
                size=size,
                how=f"{layer.gathered / 2**20:,.1f} MiB x {n} layers x {lives} micro-batches",
                origin=layer.origin,
            )

    def transient(self, *, loss: bool) -> Iterable[Item]:
        """Copies of logits beside what is kept, or gradients inside one layer."""
        kinds = [layer for layer, _ in self.layers if layer.loss == loss and layer.transient]
        for layer in sorted(kinds, key=lambda x: -x.transient)[:1]:
            yield Item(
                name=f"working memory of {layer.name}",
                size=layer.transient,
                how="tensors that exist during its forward or backward only",
                origin=layer.origin,
            )

    def recomputed(self) -> Iterable[Item]:
        """What one checkpointed layer keeps while it is recomputed."""
        kinds = [layer for layer, _ in self.layers if self.kept(layer) < layer.kept]
        for layer in sorted(kinds, key=lambda x: -x.kept)[:1]:
            yield Item(
                name=f"recomputed activations of {layer.name}",
                size=layer.kept,
                how="one layer at a time",
                origin=layer.origin,
            )

    def resident(self) -> Iterable[Item]:
        """FSDP's units that stay gathered."""
        if self.work.sharding is not Sharding.FULL:
            return
        for layer, n in self.layers:
            if layer.resident:
                width = self.work.precision.compute
                yield Item(
                    name=f"gathered {layer.name}",
                    size=layer.parameters * n * width,
                    how=f"{layer.parameters:,} elements x {width} bytes, until the end of the step",
                    origin=layer.origin,
                )

    def gathered(self) -> Iterable[Item]:
        """FSDP's gathered units, two at a time, and the gradients of one on their way."""
        if self.work.sharding is not Sharding.FULL:
            return
        precision = self.work.precision
        units = [(x.parameters, n) for x, n in self.layers if not x.resident and not x.lookup]
        most, count = max(units, default=(0, 0))
        outside = [(x, n) for x, n in self.layers if x.loss or not x.matmuls]
        held = sum(x.parameters * n for x, n in outside if x.resident)
        yield Item(
            name="gathered units",
            size=most * precision.compute * min(2, count),
            how=f"{min(2, count)} x {most:,} elements x {precision.compute} bytes",
        )
        yield Item(
            name="gradients before reduction",
            size=most * (precision.compute + precision.reduce) + held * precision.compute,
            how="of one unit in two dtypes, and of units outside the layers that stay gathered",
        )

    def reduced(self) -> Iterable[Item]:
        """A unit's whole gradient and its copy for the reduce-scatter."""
        if self.work.sharding is not Sharding.FULL:
            return
        precision = self.work.precision
        largest = max((x.parameters for x, _ in self.layers), default=0)
        yield Item(
            name="gradients being reduced",
            size=largest * precision.reduce,
            how=f"the largest unit, {largest:,} elements x {precision.reduce} bytes",
        )

    def stepped(self) -> Iterable[Item]:
        if copies := self.stack.optimizer_copies:
            yield Item(
                name="copies in the optimizer",
                size=copies * self.trained / self.steps * self.work.precision.rest,
                how=f"{copies:g} x the parameters it steps",
            )
