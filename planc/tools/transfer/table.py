"""The table of a transfer: the blocks of ranks that fill the blocks of other ranks.

Layers of one kind share a `WeightFlow`. Buckets, messages and bytes follow from the table alone, so
both sides compute them, and nothing but weights is sent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm

from planc.ir.patches import Box, HeldPatch, Index, Patch, TransferSide, cover, group_by_hub, volume
from planc.model.facts import DTYPE_BYTES


class MissingError(Exception):
    """No rank of the training plan holds elements that the engine needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A block of a tensor of the files on its way to several ranks.

    Args:
        number: in its flow.
        box: the block.
        sources, targets: the ranks that hold it, and those that get it.
        of, to: its place in tensors of these ranks.
    """

    number: int
    box: Box
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    of: Patch
    to: Patch


@dataclass(frozen=True, kw_only=True)
class WeightFlow:
    """The moves of a tensor of the files, equal in like layers.

    Args:
        hub: its name, with `{}` for the indices of layers.
        indices: of the layers.
        wire: the dtype in which it is sent, the narrower of both sides.
        moves: that fill all targets, each element once.
        same: the source rank that is the same process as a target rank.
    """

    hub: str
    indices: tuple[Index, ...]
    wire: str
    moves: tuple[Move, ...]
    same: Mapping[int, int] = field(default_factory=dict)

    def source(self, move: Move, at: int, layer: int) -> int:
        """The rank that sends a move to its target number `at`: the same process, else one of the
        replicas in turn.
        """
        own = self.same.get(move.targets[at])
        if own is not None and own in move.sources:
            return own
        return move.sources[(layer + move.number + at) % len(move.sources)]

    def pairs(self, layer: int) -> Iterator[tuple[Move, int, int]]:
        """Yields the moves of a layer, by its position in `indices`: source and target rank."""
        for move in self.moves:
            for at, target in enumerate(move.targets):
                yield move, self.source(move, at, layer), target

    @cached_property
    def period(self) -> int:
        """The number of layers after which replicas send in the same turn again."""
        return lcm(*(len(move.sources) for move in self.moves))

    def bytes(self, box: Box) -> int:
        return volume(box) * DTYPE_BYTES[self.wire]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPart:
    """A part of the moves of one layer, the blocks cut into `of` parts along their longest dim."""

    flow: WeightFlow
    layer: int
    number: int = 0
    of: int = 1

    def block(self, move: Move) -> Box | None:
        """The part of a move's block; None if it is empty."""
        if self.of == 1:
            return move.box
        dim = longest(move.box)
        start, stop = move.box[dim]
        size = stop - start
        low, high = (
            start + size * self.number // self.of,
            start + size * (self.number + 1) // self.of,
        )
        return (*move.box[:dim], (low, high), *move.box[dim + 1 :]) if low < high else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTable:
    """All moves between two sides.

    Args:
        sources, targets: the numbers of ranks.
        same: the source rank that is the same process as a target rank.
    """

    sources: int
    targets: int
    flows: tuple[WeightFlow, ...]
    same: Mapping[int, int] = field(default_factory=dict)

    @property
    def units(self) -> list[tuple[WeightFlow, int]]:
        """The layers of all flows in the order in which they are sent: that of the model, and
        ranks of different stages in turn, so that all send from the beginning.
        """
        queues: dict[frozenset[int], list[tuple[Index, int, int]]] = {}
        for number, flow in enumerate(self.flows):
            holders = frozenset(rank for move in flow.moves for rank in move.sources)
            queue = queues.setdefault(holders, [])
            queue += ((index, number, layer) for layer, index in enumerate(flow.indices))
        placed = list[tuple[float, int, tuple[Index, int, int]]]()
        for turn, queue in enumerate(queues.values()):
            ordered = sorted(queue)
            placed += (((at + 0.5) / len(ordered), turn, one) for at, one in enumerate(ordered))
        return [(self.flows[number], layer) for _, _, (_, number, layer) in sorted(placed)]


def longest(box: Box) -> int:
    """The dim of a block along which it is cut."""
    return max(range(len(box)), key=lambda dim: box[dim][1] - box[dim][0], default=0)


def table_of(
    sources: TransferSide, targets: TransferSide, same: Mapping[int, int] | None = None
) -> TransferTable:
    """The table of a transfer.

    Args:
        sources, targets: both sides.
        same: the source rank that is the same process as a target rank, which sends nothing.

    Raises:
        MissingError: the sources lack elements of a target.
    """
    held, flows = group_by_hub(sources.held), list[WeightFlow]()
    for hub, wanted in group_by_hub(targets.held).items():
        for having, needing, indices in _layers(hub, held.get(hub, []), wanted):
            flows.append(_flow(hub, having, needing, indices, same or {}))
    return TransferTable(
        sources=sources.size, targets=targets.size, flows=tuple(flows), same=same or {}
    )


Layers = Iterator[tuple[list[HeldPatch], list[HeldPatch], tuple[Index, ...]]]


def _layers(hub: str, having: Sequence[HeldPatch], needing: Sequence[HeldPatch]) -> Layers:
    """The layers of a tensor, those together that the same ranks hold in the same way."""
    kinds: dict[tuple[tuple[int, ...], ...], list[Index]] = {}
    holders = [_by_index(side) for side in (having, needing)]
    for index in sorted(holders[1]):
        kinds.setdefault(tuple(tuple(one.get(index, ())) for one in holders), []).append(index)
    for (sources, targets), indices in kinds.items():
        if not sources:
            raise MissingError(f"no rank holds {hub.format(*indices[0])}")
        yield [having[n] for n in sources], [needing[n] for n in targets], tuple(indices)


def _by_index(held: Sequence[HeldPatch]) -> dict[Index, tuple[int, ...]]:
    """The numbers of the patches of each layer; like layers share a tuple."""
    sets: dict[tuple[Index, ...], list[int]] = {}
    for number, one in enumerate(held):
        sets.setdefault(one.indices, []).append(number)
    found: dict[Index, tuple[int, ...]] = {}
    for indices, numbers in sets.items():
        own = tuple(numbers)
        for index in indices:
            found[index] = found[index] + own if index in found else own
    return found


def _flow(
    hub: str,
    having: Sequence[HeldPatch],
    needing: Sequence[HeldPatch],
    indices: tuple[Index, ...],
    same: Mapping[int, int],
) -> WeightFlow:
    replicas: dict[Box, tuple[Patch, list[int]]] = {}
    for one in having:
        replicas.setdefault(one.patch.box, (one.patch, []))[1].extend(one.ranks)
    boxes, moves = [*replicas], list[Move]()
    for one, ranks in _list_targets(needing, same):
        local = {same[rank] for rank in ranks if rank in same}
        order = (
            sorted(boxes, key=lambda box: local.isdisjoint(replicas[box][1])) if local else boxes
        )
        blocks, rest = cover(order, one.patch.box)
        if rest:
            raise MissingError(f"no rank holds {rest[0]} of {hub}, which rank {ranks[0]} needs")
        for number, block in blocks:
            patch, sources = replicas[order[number]]
            moves.append(
                Move(
                    number=len(moves),
                    box=block,
                    sources=tuple(sources),
                    targets=ranks,
                    of=patch,
                    to=one.patch,
                )
            )
    kinds = having[0].dtype, needing[0].dtype
    wire = min(kinds, key=lambda kind: DTYPE_BYTES[kind])
    return WeightFlow(hub=hub, indices=indices, wire=wire, moves=tuple(moves), same=same)


def _list_targets(
    needing: Sequence[HeldPatch], same: Mapping[int, int]
) -> Iterator[tuple[HeldPatch, tuple[int, ...]]]:
    """The patches to fill, each for all its ranks; one by one for ranks that hold sources too."""
    for one in needing:
        alone = [rank for rank in one.ranks if rank in same]
        yield from ((one, (rank,)) for rank in alone)
        if rest := tuple(rank for rank in one.ranks if rank not in same):
            yield one, rest


# Buckets -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BucketLoad:
    """The bytes that ranks send and receive, and which pairs exchange messages, as a bit mask."""

    sent: Mapping[int, int]
    received: Mapping[int, int]
    pairs: int

    @property
    def most(self) -> int:
        return max((*self.sent.values(), *self.received.values()), default=0)


def buckets(
    table: TransferTable, most: int, note: Callable[[BucketLoad], None] | None = None
) -> Iterator[list[FlowPart]]:
    """The parts of all layers in buckets: no rank sends or receives more than `most` bytes in one,
    unless single elements do.

    Args:
        note: is called with the load of each bucket.
    """
    loads = _Loads(table)
    bucket, sent, received, pairs = list[FlowPart](), dict[int, int](), dict[int, int](), 0
    for flow, layer in table.units:
        count = _count_parts(flow, layer, loads, most)
        for number in range(count):
            part = FlowPart(flow=flow, layer=layer, number=number, of=count)
            load = loads.find(part)
            full = any(sent.get(r, 0) + n > most for r, n in load.sent.items()) or any(
                received.get(r, 0) + n > most for r, n in load.received.items()
            )
            if bucket and full:
                if note:
                    note(BucketLoad(sent, received, pairs))
                yield bucket
                bucket, sent, received, pairs = [], {}, {}, 0
            bucket.append(part)
            pairs |= load.pairs
            for total, added in ((sent, load.sent), (received, load.received)):
                for rank, size in added.items():
                    total[rank] = total.get(rank, 0) + size
    if bucket:
        if note:
            note(BucketLoad(sent, received, pairs))
        yield bucket


def _count_parts(flow: WeightFlow, layer: int, loads: "_Loads", most: int) -> int:
    """The number of parts that a layer is cut into, so that each fits a bucket."""
    count = max(1, -(-loads.find(FlowPart(flow=flow, layer=layer)).most // most))
    if count == 1:
        return 1
    longest_size = max(max((b - a for a, b in move.box), default=1) for move in flow.moves)
    while count < longest_size:
        every = (FlowPart(flow=flow, layer=layer, number=n, of=count) for n in range(count))
        if all(loads.find(part).most <= most for part in every):
            break
        count += 1
    return count


class _Loads:
    """The loads of parts; those of like layers are computed once."""

    def __init__(self, table: TransferTable) -> None:
        self.targets = table.targets
        self.known: dict[tuple[int, int, int, int], BucketLoad] = {}
        self.masks: dict[tuple[int, ...], int] = {}

    def find(self, part: FlowPart) -> BucketLoad:
        flow = part.flow
        key = id(flow), part.layer % flow.period, part.number, part.of
        if key not in self.known:
            self.known[key] = self._find(part)
        return self.known[key]

    def _find(self, part: FlowPart) -> BucketLoad:
        flow, sent, received, pairs = part.flow, dict[int, int](), dict[int, int](), 0
        for move in flow.moves:
            if (block := part.block(move)) is None:
                continue
            size = flow.bytes(block)
            if len(move.sources) == 1 and not flow.same:
                [source] = move.sources
                sent[source] = sent.get(source, 0) + size * len(move.targets)
                pairs |= self._mask(move.targets) << source * self.targets
                for target in move.targets:
                    received[target] = received.get(target, 0) + size
                continue
            for at, target in enumerate(move.targets):
                source = flow.source(move, at, part.layer)
                if flow.same.get(target) == source:
                    continue
                sent[source] = sent.get(source, 0) + size
                received[target] = received.get(target, 0) + size
                pairs |= 1 << source * self.targets + target
        return BucketLoad(sent, received, pairs)

    def _mask(self, targets: tuple[int, ...]) -> int:
        if targets not in self.masks:
            self.masks[targets] = sum(1 << target for target in targets)
        return self.masks[targets]
