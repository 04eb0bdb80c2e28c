"""Bytes that a rank of each pipeline stage holds, by item and by moment of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isclose
from operator import mul

from planc.diagnostics.source import Span
from planc.lowering.schedules import InFlight, in_flight, orders
from planc.tools.estimate.profiles import Hardware, Stack
from planc.tools.estimate.workload import Layer, Sharding, Workload

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An item of a rank's memory.

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
    """The memory of a rank at one time of a step."""

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
        copied: bytes of the host's memory that a save in the background takes while it writes: of
            parameters and states, whether they train or not.
    """

    rank: int
    moments: tuple[Moment, ...]
    copied: float = 0.0

    @property
    def largest(self) -> Moment:
        return max(self.moments, key=lambda m: m.size)

    @property
    def peak(self) -> float:
        """Bytes that the allocator has handed out at most."""
        return self.largest.size


def memory(work: Workload, stack: Stack) -> list[RankMemory]:
    """The memory of each pipeline rank."""
    return [_Rank(work, stack, rank).memory() for rank in range(work.pipeline.size)]


def usable(hardware: Hardware, stack: Stack) -> float:
    """Bytes that the allocator can hand out before it fails."""
    return max(0.0, hardware.memory_gib - hardware.context_gib) * stack.memory_margin * GIB


_Stage = tuple[tuple[Layer, int], ...]


class _Rank:
    def __init__(self, work: Workload, stack: Stack, rank: int) -> None:
        self.work, self.stack, self.rank = work, stack, rank
        own = work.of_rank(rank)
        self.begins = [stage == 0 for stage in own]
        """Whether a stage takes the inputs, so that its backward passes are not split."""
        self.stages = [work.stages[stage] for stage in own]
        others = {*range(len(work.stages))} - {*own}
        ways = dict(enumerate(work.messages if work.staged else ()))
        self.sends = [ways[s][0] if s in ways and s + 1 in others else 0.0 for s in own]
        self.returns = [ways[s - 1][1] if s - 1 in ways and s - 1 in others else 0.0 for s in own]
        self.layers = [pair for stage in self.stages for pair in stage]
        self.elements = sum(layer.parameters * n for layer, n in self.layers)
        self.trained = self.elements - sum(layer.frozen * n for layer, n in self.layers)
        self.full = work.sharding is Sharding.FULL
        self.whole = self.full and work.reduced_once
        apart = sum(layer.apart * n for layer, n in self.layers)
        # the share of the rank, by the ranks that shard what is apart and what is not
        rest = (self.elements - apart) / work.data.size
        rest += apart / (work.apart[0].size if work.apart else 1)
        self.part = rest / self.elements if self.elements else 1.0
        self.shard = self.part if self.full else 1.0

    def memory(self) -> RankMemory:
        work = self.work
        held = (*self.parameters_and_states(), *self.gradients())
        early = self.parameters_and_states() if self.whole or work.micro_batches == 1 else held
        first, later = self.in_flight()
        most = self.fullest(first)
        usual = self.fullest(moment.after_backward for moment in first)
        before = (*early, *self.grown_at(most))
        loss = (*before, *self.activations(most), *self.resident(), *self.beside_loss())
        inner = (*self.resident(every=False), *self.gathered_units(), *self.recomputed_items())
        activations = (*self.activations(usual, loss=False), *inner, *self.transient(loss=False))
        backward = (*early, *self.grown_at(usual), *activations)
        moments = [
            Moment(name="loss", items=loss),
            Moment(name="backward of a layer", items=backward),
        ]
        if later:
            most = self.fullest(moment.after_backward for moment in later)
            again = self.recomputed_again(most.begins.chunk)
            passing = (*early, *self.grown_at(most), *self.inner_gradients(weights=True))
            waited = (*passing, *self.activations(most), *self.resident(), *again)
            moments.append(Moment(name="gradients of weights", items=waited))
        end = (*held, *self.reduction_buffers())
        if self.whole and work.staged:
            whole = (
                *self.parameters_and_states(),
                *self.whole_gradients(self.stages),
                *self.stays_gathered(),
            )
            left = (*whole, *self.activations(usual, done=1), *self.gradients_on_their_way())
            moments.append(Moment(name="end of a micro-batch", items=left))
            # units are reduced one by one, each of which frees its whole gradient
            end = (*whole, *self.reduction_buffers())
        moments.append(Moment(name="end of backward", items=end))
        moments.append(Moment(name="optimizer step", items=(*held, *self.optimizer_copies())))
        return RankMemory(rank=self.rank, moments=tuple(moments), copied=self.copied_bytes())

    def parameters_and_states(self) -> tuple[Item, ...]:
        if self.work.offload:
            return ()
        precision = self.work.precision
        return (
            self._shard_item("parameters", self.elements, precision.rest, self.shard),
            self.states(),
        )

    def copied_bytes(self) -> float:
        """`RankMemory.copied`; replicas copy all, whichever of them writes it."""
        states = self.trained * self.work.precision.states
        if self.work.updates:
            states = sum(layer.stored * n for layer, n in self.layers)
        return (self.elements * self.work.precision.rest + states) * self.shard

    def states(self) -> Item:
        precision, name = self.work.precision, "optimizer state"
        if not self.work.updates:
            return self._shard_item(name, self.trained, precision.states, self.shard)
        size = sum(layer.states * n for layer, n in self.layers)
        how = f"{size / GIB:,.2f} GiB of {self.work.updates[self.rank].name}, sharded"
        return Item(name=name, size=size * self.shard, how=how, origin=self.work.origin)

    def gradients(self) -> tuple[Item, ...]:
        if self.work.offload:
            return ()
        precision = self.work.precision
        width = precision.reduce if self.shard == 1 else precision.rest
        return (self._shard_item("gradients", self.trained, width, self.shard),)

    def _shard_item(self, name: str, elements: int, width: int, share: float = 1.0) -> Item:
        count, ranks = 1 / share, ""
        if share < 1 and isclose(count, round(count), rel_tol=1e-6):
            ranks = f" / {count:.6g} ranks"
        elif share < 1:  # a mean: experts are sharded over other ranks than the rest
            ranks = f", {share:.1%} of them on a rank"
        how = f"{elements:,} elements x {width} bytes{ranks}"
        size = elements * share * width
        return Item(name=name, size=size, how=how, origin=self.work.origin)

    def grown_at(self, moment: InFlight) -> tuple[Item, ...]:
        """The whole gradients that exist at a moment."""
        stages = zip(self.stages, moment.passed, strict=True)
        return self.grown([stage for stage, done in stages if done or self.work.runs > 1])

    def grown(self, stages: list[_Stage]) -> tuple[Item, ...]:
        """The whole gradients of stages, where passes add to them."""
        more = self.work.micro_batches * self.work.runs > 1
        return (*self.whole_gradients(stages),) if self.whole and more else ()

    def whole_gradients(self, stages: list[_Stage]) -> Iterable[Item]:
        """Whole gradients of several micro-batches, which FSDP reduces at the end of a step."""
        width = self.work.precision.reduce
        layers = [pair for stage in stages for pair in stage]
        if trained := sum((layer.parameters - layer.frozen) * n for layer, n in layers):
            yield self._shard_item("whole gradients", trained, width)
        if unsplit := sum(layer.unsplit * n for layer, n in layers):
            yield self._shard_item("gradients that are not split yet", unsplit, width)

    def stays_gathered(self) -> Iterable[Item]:
        width = self.work.precision.compute
        yield self._shard_item("units gathered after backward", self.elements, width)

    def gradients_on_their_way(self) -> Iterable[Item]:
        most = max((_unit(x) for x, _ in self.layers if not x.lookup), default=0)
        if (width := self.work.precision.compute) != self.work.precision.reduce:
            yield self._shard_item("gradients before accumulation", most, width)

    def saved_bytes(self, layer: Layer) -> float:
        """Bytes of one layer's activations for one micro-batch."""
        return 0.0 if layer.offloaded else layer.stays

    def waits(self, layer: Layer) -> float:
        """Bytes that one layer of one micro-batch holds for the gradients of its weights, beside
        what it keeps: the gradients of its outputs, without what the loss kept.
        """
        return layer.outputs - layer.scored

    def in_flight(self) -> tuple[list[InFlight], list[InFlight]]:
        """The micro-batches in flight when a backward begins, and when the delayed gradients of
        weights begin.
        """
        work, ranks = self.work, self.work.pipeline.size
        every = orders(work.schedule, ranks, work.chunks, work.micro_batches, work.rank_passes)
        found = in_flight(every[self.rank], work.chunks)
        first = [moment for moment in found if moment.begins.part != "W"]
        return first, [moment for moment in found if moment.begins.part == "W"]

    def fullest(self, moments: Iterable[InFlight]) -> InFlight:
        """The moment at which the rank holds most."""
        apart = (
            0.0 if first else sum(self.waits(x) * n for x, n in stage)
            for stage, first in zip(self.stages, self.begins, strict=True)
        )
        grown = (sum(x.size for x in self.grown([stage])) for stage in self.stages)
        sizes = (*self.kept_by_stage(), *apart, *grown)
        again = [sum(x.size for x in self.recomputed_again(i)) for i in range(len(self.stages))]

        def size(moment: InFlight) -> float:
            counts = (*moment.held, *moment.waiting, *moment.passed)
            found: float = sum(map(mul, counts, sizes))
            return found + again[moment.begins.chunk] * (moment.begins.part == "W")

        return max(moments, key=size)

    def kept_by_stage(self) -> list[float]:
        """Bytes of one micro-batch's activations in each stage of this rank."""
        return [sum(self.saved_bytes(x) * n for x, n in stage) for stage in self.stages]

    def activations(self, most: InFlight, *, loss: bool = True, done: int = 0) -> Iterable[Item]:
        """By kind of layer; what the loss keeps is freed before the layers' backward.

        Args:
            most: the micro-batches that each stage holds.
            done: the number of micro-batches of the fullest stage whose backward has passed.
        """
        every = most.held
        if done:
            each = self.kept_by_stage()
            fullest = max(range(len(each)), key=lambda i: each[i] * (every[i] > 0))
            every = tuple(h - done * (i == fullest) for i, h in enumerate(every))
        yield from self.sent_tensors(most, every)
        waiting = (n * (not first) for n, first in zip(most.waiting, self.begins, strict=True))
        for stage, held, waits in zip(self.stages, every, waiting, strict=True):
            for layer, n in stage:
                if layer.loss and not loss:
                    continue
                if kept := self.saved_bytes(layer):
                    yield from _of_layers("activations", (layer, n), kept, held, "in flight")
                name, late = "gradients for the weights", self.waits(layer)
                yield from _of_layers(name, (layer, n), late, min(waits, held), "waiting")

    def sent_tensors(self, most: InFlight, held: tuple[int, ...]) -> Iterable[Item]:
        """The tensors sent to other stages. They are held until their backward pass, or, if a rank
        has several stages, until the end of the step, when torch's runtime of such schedules waits
        for it.
        """
        lasts = self.work.schedule not in ("1f1b", "gpipe") or bool(self.work.rank_passes)
        for outputs, gradients, here, n, given in zip(
            self.sends, self.returns, held, most.sent, most.returned, strict=True
        ):
            for name, size, count in (
                ("outputs sent to the next stage", outputs, n if lasts else here),
                ("gradients sent to the stage before", gradients, given * lasts),
            ):
                if size * count:
                    how = f"{size / 2**20:,.1f} MiB x {count} micro-batches"
                    yield Item(name=name, size=size * count, how=how)

    def transient(self, *, loss: bool, gradients: bool = True) -> Iterable[Item]:
        """Copies of logits beside what is kept, or gradients inside one layer.

        Whole logits have `loss_transient` bytes each: in 16 bits 2 and 2 of themselves and of their
        gradient, and 4 of that in float32. Before there are `gradients` a copy of 4 is there; in
        float32 logits have no copy, and one gradient.
        """
        kinds = [layer for layer, _ in self.layers if layer.loss == loss and layer.transient]
        for layer in sorted(kinds, key=lambda x: -x.transient)[:1]:
            size = layer.transient
            if not gradients:
                one = min(4, self.work.precision.compute)
                size *= max(0.0, 1 - one / self.stack.loss_transient)
            how = "tensors that exist during its forward or backward only"
            yield _of_layer("working memory", layer, size, how)

    def beside_loss(self) -> tuple[Item, ...]:
        """The memory beside the loss and its saved tensors: at the end of its forward pass, where
        whole logits have no gradients yet, or at the beginning of its backward pass.
        """
        once = any(layer.loss and layer.at_once for layer, _ in self.layers)
        forward = (*self.transient(loss=True, gradients=once), *self.copied_out())
        backward = (*self.transient(loss=True), *self.prefetch_buffer())
        return max(backward, forward, key=lambda items: sum(item.size for item in items))

    @property
    def gathers(self) -> bool:
        """Whether units are gathered from other ranks, into a buffer."""
        return self.full and self.work.data.size > 1

    def copied_out(self) -> Iterable[Item]:
        """The buffer of a forward pass' last all-gather, which FSDP keeps until the pass ends, but
        for one behind a pipeline's stage. The root's unit is gathered first.
        """
        layers = [layer for layer, _ in self.layers]
        if not self.gathers or self.work.staged or not any(layer.loss for layer in layers):
            return
        tied = not any(x.lookup for x in layers)  # the head is gathered with the embedding, first
        others = [x for x in layers if not (x.lookup or x.root or (tied and x.loss))]
        last = (others or layers)[-1]
        elements = _unit(last) if others else round(sum(_unit(x) * n for x, n in self.layers))
        width = last.width or self.work.precision.compute
        size = last.gathered_bytes(width) if others else elements * width
        how = f"{elements:,} elements x {width} bytes{_narrow(last)}, until the forward pass ends"
        yield _of_layer("the last all-gather's buffer", last, size, how)

    def prefetch_buffer(self) -> Iterable[Item]:
        """The buffer of the last block's all-gather, which begins with the backward pass of the
        root's unit, and so with that of the loss, unless the block is gathered still.
        """
        layers = [layer for layer, _ in self.layers]
        blocks = [x for x in layers if not (x.loss or x.lookup) and _staying(x) < 1]
        if not blocks or blocks[-1].resident:
            return
        if self.gathers and any(x.root and x.loss and not x.at_once for x in layers):
            width = blocks[-1].width or self.work.precision.compute
            how = f"{_unit(blocks[-1]):,} elements x {width} bytes, before its backward pass"
            name = "the next all-gather's buffer"
            yield _of_layer(name, blocks[-1], blocks[-1].gathered_bytes(width), how)

    def recomputed_items(self) -> Iterable[Item]:
        """The activations of one checkpointed layer while it is recomputed."""
        kinds = [layer for layer, _ in self.layers if self.saved_bytes(layer) < layer.kept]
        for layer in sorted(kinds, key=lambda x: -x.kept)[:1]:
            yield _of_layer("recomputed activations", layer, layer.kept, "one layer at a time")

    def recomputed_again(self, chunk: int) -> Iterable[Item]:
        """The activations that torch recomputes for the gradients of a stage's weights, and keeps
        until it has all; the first stage computes these gradients as usual.
        """
        stage = self.stages[chunk]
        more = any(layer.loss for layer, _ in stage)
        for layer, n in () if self.begins[chunk] else stage:
            last = max(layer.again, layer.left) if more else layer.again
            if size := layer.left * (n - 1) + last:
                how = f"{size / n / 2**20:,.1f} MiB x {n} layers"
                yield _of_layer("recomputed for the weights", layer, size, how)

    def resident(self, *, every: bool = True) -> Iterable[Item]:
        """FSDP's units that are gathered from the loss on; in the backward pass of a block the last
        one is one of the two in `gathered_units`, or is resharded.
        """
        for layer, count in self.layers if self.full else ():
            staying = _staying(layer)
            if n := round(staying * count) if every else count * int(staying):
                width = layer.width or self.work.precision.compute
                of = f"{layer.parameters:,} elements x {width} bytes{_narrow(layer)}"
                how, name = f"{of}, until the end of the step", f"gathered {layer.name}"
                size = n * (layer.parameters * width - layer.narrow * (width - 1))
                yield Item(name=name, size=size, how=how, origin=layer.origin)

    def gathered_units(self) -> Iterable[Item]:
        """FSDP's gathered units, two at a time, and the gradients of one on their way."""
        if not self.full:
            return
        precision = self.work.precision
        units = [(_unit(x), n, x) for x, n in self.layers if _staying(x) < 1 and not x.lookup]
        most, count, layer = max(units, key=lambda u: u[:2], default=(0, 0, None))
        narrow = _narrow(layer) if layer else ""
        how = f"{min(2, count)} x {most:,} elements x {precision.compute} bytes{narrow}"
        less = layer.narrow * (precision.compute - 1) if layer else 0
        size, origin = (most * precision.compute - less) * min(2, count), self.work.origin
        yield Item(name="gathered units", size=size, how=how, origin=origin)
        if self.whole:
            yield from self.gradients_on_their_way()
            yield from self.inner_gradients()
            if not self.work.staged:
                yield self._shard_item("gradients being reduced", most, precision.reduce)
            return
        outside = [(x, n) for x, n in self.layers if x.loss or not x.matmuls]
        held = sum(x.parameters * n for x, n in outside if _staying(x))
        yield Item(
            name="gradients before reduction",
            size=most * (precision.compute + precision.reduce) + held * precision.compute,
            how="of one unit in two dtypes, and of units outside the layers that stay gathered",
            origin=origin,
        )

    def inner_gradients(self, *, weights: bool = False) -> Iterable[Item]:
        """The gradients of both factors of a product of a layer's widest activations, such as those
        of a gated MLP, which exist at once; or that of the largest weight, beside its sum.
        """
        products = [m for x, _ in self.layers if not x.loss for m in x.matmuls]
        most = max((m.m * m.n * m.count for m in products), default=0) * 2
        if weights:
            most = max((m.n * m.k * m.count for m in products), default=0)
        item = self._shard_item("gradients inside a layer", most, self.work.precision.compute)
        yield replace(item, origin=None)

    def reduction_buffers(self) -> Iterable[Item]:
        """A unit's whole gradient and its copy for the reduce-scatter; of tied weights, which are
        gathered then, the gradients of the head and of the embedding, and their sum.
        """
        if not self.full:
            return
        precision, layers = self.work.precision, [layer for layer, _ in self.layers]
        most = max(layers, key=lambda x: (_trained_elements(x), x.last))
        reduced = self._shard_item(
            "gradients being reduced", _trained_elements(most), precision.reduce
        )
        if self.work.data.size > 1 and not self.whole:
            # all of its gradients, before it has a shard, or the last one, which torch holds longer
            every = _trained_elements(most) * (precision.compute - self.part * precision.rest)
            more = max(every, most.last * precision.compute)
            how = f"{reduced.how}, and {more / 2**20:,.1f} MiB that they are copied from"
            reduced = replace(reduced, size=reduced.size + more, how=how)
        for layer in layers:
            added = self.tied_gradients(layer)
            reduced = added if added.size > reduced.size else reduced
        yield reduced

    def tied_gradients(self, layer: Layer) -> Item:
        """The gathered unit of tied weights and its gradients, of these weights those of the head,
        of the embedding and their sum; and what the last block's reduce-scatter reads, until the
        next one.
        """
        precision = self.work.precision
        own = _trained_elements(layer) if layer.tied else 0
        size = 2 * (own + layer.tied) * precision.compute - own * self.part * precision.rest
        how = f"2 x {own + layer.tied:,} elements x {precision.compute} bytes, less the shard"
        blocks = (x for x, _ in self.layers if not (x.loss or x.lookup or x.root))
        if layer.tied and (first := next(blocks, None)):
            size += _trained_elements(first) * precision.reduce
            how += f", and {_trained_elements(first):,} x {precision.reduce} bytes of a block"
        return Item(name="tied gradients being added", size=size, how=how, origin=self.work.origin)

    def optimizer_copies(self) -> Iterable[Item]:
        copies = 0 if self.work.offload else self.stack.optimizer_copies
        if copies and self.work.updates:
            update = self.work.updates[self.rank]
            how = f"of the parameters that {update.name} steps at once"
            name = "copies in the optimizer"
            yield Item(name=name, size=update.held, how=how, origin=update.origin)
        elif copies:
            size = copies * self.trained * self.shard * self.work.precision.rest
            how = f"{copies:g} x the parameters it steps"
            yield Item(name="copies in the optimizer", size=size, how=how, origin=self.work.origin)


def _of_layer(what: str, layer: Layer, size: float, how: str) -> Item:
    return Item(name=f"{what} of {layer.name}", size=size, how=how, origin=layer.origin)


def _of_layers(
    what: str, layers: tuple[Layer, int], each: float, times: int, state: str
) -> Iterable[Item]:
    """The memory of equal layers for some micro-batches, `each` bytes a layer and micro-batch."""
    layer, n = layers
    if size := each * n * times:
        how = f"{each / 2**20:,.1f} MiB x {n} layers x {times} {state}"
        yield _of_layer(what, layer, size, how)


def _narrow(layer: Layer) -> str:
    """Says which elements of a gathered unit take one byte."""
    return f", {layer.narrow:,} of them in 1 byte" if layer.narrow else ""


def _staying(layer: Layer) -> float:
    """The share of equal layers that are gathered from the loss on, where the root's backward pass
    begins.
    """
    return 1.0 if layer.root else layer.resident


def _trained_elements(layer: Layer) -> int:
    """Elements of the largest FSDP unit of a layer that train."""
    return layer.root or max(0, _unit(layer) - layer.frozen)


def _unit(layer: Layer) -> int:
    """Elements of the largest FSDP unit of a layer."""
    return max(layer.parameters - layer.apart, layer.apart)
