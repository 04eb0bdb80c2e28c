"""The messages of a transfer: blocks packed as bytes, in buckets of one message for each pair."""

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn import functional

from planc.diagnostics.diagnostic import PlanError
from planc.ir.patches import Box, Patch
from planc.runtime.preconditions import stop
from planc.tools.transfer.table import FlowPart, TransferTable, buckets

Values = Callable[[str], Tensor]
BLOCK = 4096
"""The bytes that are sent together if one of them changed."""
ERRORS = "errors"
"""The key of the errors of processes."""
ANSWER_SECONDS = 2.0
HELP = (
    "restart it, join with a new `run.transfer`, and publish; until then the engine's weights are "
    "incomplete"
)


@dataclass(frozen=True, slots=True)
class SentBlock:
    """A block of a tensor of the files in a message.

    Args:
        name: of the tensor of the files.
        box: the block.
        of, to: the sender's and the receiver's tensor.
        source, target: their names.
        wire: the dtype in which it is sent.
    """

    name: str
    box: Box
    of: Patch
    to: Patch
    source: str
    target: str
    wire: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * int(self.wire.itemsize)


@dataclass(slots=True)
class Counts:
    """The bytes and messages that this process has sent, and the most bytes in its buffers."""

    bytes: int = 0
    messages: int = 0
    peak: int = 0


@dataclass(kw_only=True)
class Channel:
    """The processes of both sides: a group of their own, beside that of the training run.

    Args:
        store: that all processes reach.
        process: the number of this one among all.
        names: of all, for messages.
        seconds: after which a process that does not answer counts as lost.
        table: the blocks of all tensors.
        bucket: the bytes that a rank sends or receives at once.
        delta: whether only blocks of bytes are sent that changed since the last transfer; senders
            then keep a copy of all that they sent.
    """

    store: Any
    process: int
    names: tuple[str, ...]
    seconds: float
    table: TransferTable
    bucket: int
    delta: bool = False
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        limit = timedelta(seconds=self.seconds)
        self.store = distributed.PrefixStore("planc.transfer", self.store)
        size = len(self.names)
        try:
            self.group: Any = distributed.ProcessGroupGloo(self.store, self.process, size, limit)
        except RuntimeError as error:
            raise process_lost("another process", "it did not join the transfer", error) from None
        self.rounds = self.bucket_number = self.complete = 0
        self.last: dict[tuple[int, int], Tensor] = {}  # by bucket and receiver

    @cached_property
    def bucket_parts(self) -> list[list[FlowPart]]:
        """The parts of all layers, in the order in which they are sent."""
        return [*buckets(self.table, self.bucket)]

    def agree(self, text: str, *, about: str = "") -> list[str]:
        """The texts of all processes, in order; a collective without messages between them.

        Raises:
            PlanError: PL698, a process does not answer, or has left after an error.
        """
        self.rounds += 1
        self.bucket_number = len(self.bucket_parts)
        return call_within(
            self.seconds + ANSWER_SECONDS,
            lambda: self._agree(f"{self.rounds}", text, about),
            lambda: process_lost(self.names[0], about, "its store does not answer"),
        )

    def _agree(self, prefix: str, text: str, about: str) -> list[str]:
        keys = [f"{prefix}/{process}" for process in range(len(self.names))]
        found, end = list[str](), time.monotonic() + self.seconds
        try:
            self.store.set(keys[self.process], text)
            for key in keys:
                while not self._wait(key, end):
                    if self.store.check([ERRORS]):
                        raise stop("PL698", self._first_error(), help=HELP)
                found.append(self.store.get(key).decode())
        except RuntimeError as error:
            gone = isinstance(error, distributed.DistNetworkError)  # the store is that of process 0
            raise process_lost(self.names[0 if gone else len(found)], about, error) from None
        return found

    def _wait(self, key: str, end: float) -> bool:
        """Waits for a key, for a short time until a limit is over; whether it is there."""
        left = end - time.monotonic()
        try:
            self.store.wait([key], timedelta(seconds=min(max(left, 0.001), ANSWER_SECONDS)))
        except distributed.DistStoreError:
            if left <= ANSWER_SECONDS:
                raise
            return False
        return True

    def leave(self, error: BaseException) -> PlanError | None:
        """Leaves after an error, and tells the others.

        Returns:
            If a process was lost, the first error of all processes. The others would name a
            process that has left after an error, instead of the one that stopped.
        """
        text, lost = f"{self.names[self.process]} stopped: {error!r}", False
        if isinstance(error, PlanError) and error.diagnostics[0].code == "PL698":
            text, lost = error.diagnostics[0].message, True

        def first_error() -> str:
            self.store.append(ERRORS, json.dumps([self.bucket_number, text]) + "\n")
            time.sleep(ANSWER_SECONDS / 2)  # others may run into their time limit at this moment
            return self._first_error()

        try:
            text = call_within(2 * ANSWER_SECONDS, first_error, lambda: RuntimeError("late"))
        except RuntimeError:
            if not text.startswith(self.names[0]):
                text = f"{self.names[0]} stopped, whose store does not answer ({text})"
        traceback.clear_frames(error.__traceback__)  # they refer to the group
        self.close()
        if self.process == 0:
            self._keep_store()
        return stop("PL698", text, help=HELP) if lost else None

    def _first_error(self) -> str:
        """The error in the first bucket: later ones follow from it."""
        return str(min(self._errors(), key=lambda error: error[0])[1])

    def _errors(self) -> list[tuple[int, str]]:
        """The bucket and the text of each error."""
        return [json.loads(line) for line in self.store.get(ERRORS).decode().splitlines()]

    def _keep_store(self) -> None:
        """Lets the others read the errors, before this process may end with its store."""
        end = time.monotonic() + 2 * ANSWER_SECONDS
        while len(self._errors()) < len(self.names) - 1 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(ANSWER_SECONDS)

    def close(self) -> None:
        """Ends the group, so that others that wait for this process see that it has gone."""
        self.group = None


T = TypeVar("T")


def call_within(seconds: float, call: Callable[[], T], late: Callable[[], BaseException]) -> T:
    """The result of a call that may never return, as to a store whose process is stopped.

    Raises:
        BaseException: that of the call, or of `late` if it does not return in time.
    """
    results, errors = list[T](), list[BaseException]()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    raise errors[0] if errors else late()


def process_lost(who: str, about: str, error: object) -> PlanError:
    """The error for a process that stopped in the middle."""
    reason = str(error).strip().partition("\n")[0]
    where = f" {about}" if about else ""
    return stop("PL698", f"{who} stopped{where}: {reason[:200]}", help=HELP)


@dataclass(frozen=True, kw_only=True)
class ProcessRoles:
    """The ranks that this process has on either side, None for none, and the processes of all."""

    source: int | None
    target: int | None
    sources: tuple[int, ...]
    targets: tuple[int, ...]


def exchange(
    channel: Channel,
    roles: ProcessRoles,
    values: Callable[[Iterable[str]], Values],
    targets: Mapping[str, Tensor],
) -> None:
    """Sends and receives all blocks of the channel's table; every process of both sides calls it.

    Args:
        values: is called once for each bucket with the names of the sending sides' tensors in it,
            the same on all processes, and returns what gives this rank's tensor of a name.
        targets: the tensors of the engine on this rank, written in place.

    Raises:
        PlanError: PL698, another process stopped.
    """
    for number, bucket in enumerate(channel.bucket_parts):
        channel.bucket_number = number
        outgoing, incoming, local = _messages(bucket, roles)
        value = values(dict.fromkeys(_sources(bucket)))
        for block in local:
            _place(targets[block.target], block).copy_(_take(value(block.source), block))
        sent = {peer: _pack(blocks, value) for peer, blocks in outgoing.items()}
        if channel.delta and channel.complete:
            landing = _exchange_changes(channel, (sent, outgoing), incoming, targets)
        else:
            landing = {peer: _empty(_size(blocks)) for peer, blocks in incoming.items()}
            _send(channel, (sent, outgoing), (landing, incoming))
        channel.last |= {(number, peer): flat for peer, flat in sent.items() if channel.delta}
        for peer, flat in landing.items():
            _unpack(flat, incoming[peer], targets)
    channel.complete += 1


Message = tuple[Mapping[int, Tensor], Mapping[int, list[SentBlock]]]


def _exchange_changes(
    channel: Channel,
    sent: Message,
    incoming: Mapping[int, list[SentBlock]],
    targets: Mapping[str, Tensor],
) -> dict[int, Tensor]:
    """Exchanges the blocks of bytes that changed since the last transfer, after a mask of them;
    returns the complete messages, of which the receiver has the rest in its tensors.
    """
    flats, outgoing = sent
    masks = {
        peer: in_blocks(flat).ne(in_blocks(channel.last[channel.bucket_number, peer])).any(1)
        for peer, flat in flats.items()
    }
    known = {peer: _pack_targets(blocks, targets) for peer, blocks in incoming.items()}
    masks_in = {peer: _empty(len(in_blocks(flat))) for peer, flat in known.items()}
    bits = {peer: mask.to(torch.uint8) for peer, mask in masks.items()}
    _send(channel, (bits, outgoing), (masks_in, incoming))
    changed = {
        peer: in_blocks(flats[peer])[mask].flatten() for peer, mask in masks.items() if mask.any()
    }
    landing = {
        peer: _empty(int(mask.sum()) * BLOCK) for peer, mask in masks_in.items() if mask.any()
    }
    _send(channel, (changed, outgoing), (landing, incoming), step=1)
    for peer, part in landing.items():
        blocks = in_blocks(known[peer])
        blocks[masks_in[peer].bool()] = part.view(-1, BLOCK)
        known[peer] = blocks.flatten()[: known[peer].numel()]
    return known


def in_blocks(flat: Tensor) -> Tensor:
    """The bytes of a message as rows of `BLOCK` bytes, the last one filled with zeros."""
    return functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _pack_targets(blocks: Iterable[SentBlock], targets: Mapping[str, Tensor]) -> Tensor:
    """The bytes that a receiver got for its tensors: its dtype is that of the message, or wider."""
    return torch.cat(
        [
            _place(targets[block.target], block).to(block.wire).flatten().view(torch.uint8)
            for block in blocks
        ]
    )


def _size(blocks: Iterable[SentBlock]) -> int:
    return sum(block.nbytes for block in blocks)


def _empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _send(channel: Channel, sent: Message, landing: Message, step: int = 0) -> None:
    """Exchanges the buffers of a bucket with all peers, in its first or second step."""
    buffers = (*sent[0].values(), *landing[0].values())
    channel.counts.peak = max(channel.counts.peak, sum(b.nbytes for b in buffers))
    works, number = [], channel.bucket_number
    for (buffers_of, blocks), verb, start in (
        (landing, "sends", channel.group.recv),
        (sent, "receives", channel.group.send),
    ):
        for peer in sorted(buffers_of):
            first = blocks[peer][0].name
            about = f"in bucket {number}, in which it {verb} {first}"
            try:
                works.append((peer, about, start([buffers_of[peer]], peer, 2 * number + step)))
            except RuntimeError as error:
                raise process_lost(channel.names[peer], about, error) from None
    for peer, about, work in works:
        try:
            work.wait(timedelta(seconds=channel.seconds))
        except RuntimeError as error:
            raise process_lost(channel.names[peer], about, error) from None
    channel.counts.bytes += sum(flat.nbytes for flat in sent[0].values())
    channel.counts.messages += len(sent[0])


def _messages(
    bucket: Iterable[FlowPart], roles: ProcessRoles
) -> tuple[dict[int, list[SentBlock]], dict[int, list[SentBlock]], list[SentBlock]]:
    """The blocks that this process sends and receives, by the other process, and those that it
    has already; wider dtypes first, so that each is aligned.
    """
    outgoing: dict[int, list[SentBlock]] = {}
    incoming: dict[int, list[SentBlock]] = {}
    local: list[SentBlock] = []
    for part in bucket:
        for block, source, target in _blocks(part, roles):
            here = source == roles.source
            if here and target == roles.target:
                local.append(block)
            elif here:
                outgoing.setdefault(roles.targets[target], []).append(block)
            else:
                incoming.setdefault(roles.sources[source], []).append(block)
    for blocks in (*outgoing.values(), *incoming.values()):
        blocks.sort(key=lambda block: -block.wire.itemsize)
    return outgoing, incoming, local


def _blocks(part: FlowPart, roles: ProcessRoles) -> Iterator[tuple[SentBlock, int, int]]:
    """The blocks of a part that this process sends or receives, with source and target rank."""
    flow, index = part.flow, part.flow.indices[part.layer]
    wire = getattr(torch, flow.wire)
    for move in flow.moves:
        if roles.source not in move.sources and roles.target not in move.targets:
            continue
        if (box := part.block(move)) is None:
            continue
        block = SentBlock(
            flow.hub.format(*index),
            box,
            move.of,
            move.to,
            move.of.key.format(*index),
            move.to.key.format(*index),
            wire,
        )
        for at, target in enumerate(move.targets):
            source = flow.source(move, at, part.layer)
            if source == roles.source or target == roles.target:
                yield block, source, target


def _sources(bucket: Iterable[FlowPart]) -> Iterator[str]:
    """The names of the senders' tensors in a bucket, on all processes in the same order."""
    for part in bucket:
        index = part.flow.indices[part.layer]
        yield from (move.of.key.format(*index) for move in part.flow.moves)


def _pack(blocks: Iterable[SentBlock], value: Values) -> Tensor:
    """The bytes of some blocks, each cast to the dtype in which it is sent."""
    every = [*blocks]
    flat, at = _empty(_size(every)), 0
    for block in every:
        into = flat[at : at + block.nbytes].view(block.wire)
        into.view(block.shape).copy_(_take(value(block.source), block))
        at += block.nbytes
    return flat


def _unpack(flat: Tensor, blocks: Iterable[SentBlock], targets: Mapping[str, Tensor]) -> None:
    at = 0
    for block in blocks:
        part = flat[at : at + block.nbytes].view(block.wire).view(block.shape)
        _place(targets[block.target], block).copy_(part)
        at += block.nbytes


def _take(tensor: Tensor, block: SentBlock) -> Tensor:
    """A block of the sender's tensor, in the order of the file's dims."""
    return in_hub_order(tensor[_slices(block.of, block.box)], block.of)


def _place(tensor: Tensor, block: SentBlock) -> Tensor:
    """The block's place in the receiver's tensor, in the order of the file's dims."""
    return in_hub_order(tensor[_slices(block.to, block.box)], block.to)


def _slices(patch: Patch, box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in patch.part(box))


def in_hub_order(block: Tensor, patch: Patch) -> Tensor:
    """A view with the dims of the file; those that the file lacks have size 1 here."""
    kept = [(dim, at) for at, dim in enumerate(patch.dims) if dim is not None]
    block = block.squeeze([at for at, dim in enumerate(patch.dims) if dim is None])
    order = sorted(range(len(kept)), key=lambda n: kept[n][0])
    return block.permute(order)
