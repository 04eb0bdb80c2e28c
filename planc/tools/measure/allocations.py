"""Records the allocations and frees of a device, and the time between two moments.

The allocator's own record is replayed beside what this module noted meanwhile: which module ran, at
which moment, what a tensor is. On the CPU the record is that of torch's profiler, on CUDA the
snapshot of the caching allocator. Both tell the number of the last note, which is a label of the
profiler, and a text that the allocator keeps with each allocation. This module imports torch.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.distributed.tensor import DTensor

from planc.runtime.standalone import kept_states
from planc.tools.measure.ledger import Held, Ledger
from planc.tools.measure.storages import on_one_device

LABEL = "planc note "
_HOST = "in the host's memory"


class Allocated(NamedTuple):
    """A line of an allocator's record.

    Args:
        note: the number of the last note before it; None where the record does not say.
        address, size: of a block; negative where it is freed, 0 for no block.
    """

    note: int | None = None
    address: int = 0
    size: int = 0


class Allocations(Ledger):
    """Allocations of torch's CPU allocator, as its profiler tells of them.

    Args:
        what: says what an allocation is that is made now.
    """

    def __init__(self, what: Callable[[], str]) -> None:
        super().__init__()
        self.what = what
        self.notes: list[tuple[str, str, tuple[int, ...]]] = []
        self.last = ""
        self.inside = False

    def mark(self, moment: str) -> None:
        self._note("moment", moment)

    def note(self, tensors: Iterable[Tensor], name: str) -> None:
        """Says what the storages of tensors are."""
        local = (t._local_tensor if isinstance(t, DTensor) else t for t in tensors)
        addresses = tuple(tensor.untyped_storage().data_ptr() for tensor in local)
        self._note("tensors", name, addresses)

    def record_part(self) -> None:
        """Another module runs, or another part of a step."""
        if (now := self.what()) != self.last:
            self.last = now
            self._note("what", now)

    def _note(self, kind: str, text: str, addresses: tuple[int, ...] = ()) -> None:
        if self.inside:
            self._stamp(len(self.notes))
            self.notes.append((kind, text, addresses))

    def with_host(self) -> AbstractContextManager[None]:
        """Leaves out what is in the host's memory, where that is the device's too; what is copied
        to the device is counted.
        """
        real = kept_states.to_host

        def away(values: Tensor) -> Tensor:
            self._note("what", _HOST)
            copy = real(values)
            self._note("what", self.last)
            return copy

        return on_one_device(away)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Records what runs inside.

        FSDP gathers parameters into storages that it resizes, which the record does not tell from
        what else is allocated.
        """
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: Any, size: int) -> Any:
            self._note("what", "gathered parameters")
            result = resize(storage, size)
            self._note("what", self.last)
            return result

        allocations: list[Allocated] = []
        try:
            with (
                mock.patch.object(torch.UntypedStorage, "resize_", resize_and_note),
                self._record(allocations),
            ):
                self.inside = True
                self.record_part()
                yield
        finally:
            self.inside = False
            self._replay(allocations)

    def _stamp(self, note: int) -> None:
        with record_function(f"{LABEL}{note}"):
            pass

    @contextmanager
    def _record(self, allocations: list[Allocated]) -> Iterator[None]:
        """Adds the record of what runs inside, at its end."""
        traced = profile(use_cpu=True, use_kineto=True, profile_memory=True)
        try:
            with traced:
                yield
        finally:
            allocations += changes(traced.kineto_results.experimental_event_tree())

    def _replay(self, record: Iterable[Allocated]) -> None:
        live: dict[int, tuple[int, int]] = {}
        after, what = 0, ""
        for note, address, size in record:
            while note is not None and after <= note:
                what = self._apply_note(after, what, live)
                after += 1
            if size > 0 and what == _HOST:
                continue
            if size > 0:
                number = self.add_block(what)
                live[address] = (number, size)
                self.events.append((number, size))
            elif address in live:
                number, held = live.pop(address)
                self.events.append((number, -held))

    def _apply_note(self, at: int, what: str, live: dict[int, tuple[int, int]]) -> str:
        """Takes in a note; what is allocated after it."""
        kind, text, addresses = self.notes[at]
        if kind == "moment":
            super().mark(text)
        for address in addresses:
            if address in live:
                self.names[live[address][0]] = text
        return text if kind == "what" else what


def changes(events: Iterable[Any]) -> Iterator[Allocated]:
    """The record of a profile, from its tree of events."""
    tree, left = [], [*events]
    while left:
        event = left.pop()
        left += event.children
        tree.append(event)
    for event in sorted(tree, key=lambda event: event.start_time_ns):
        if event.name.startswith(LABEL):
            yield Allocated(int(event.name.removeprefix(LABEL)))
        elif event.name == "[memory]":
            yield Allocated(None, event.extra_fields.ptr, event.extra_fields.alloc_size)


class CudaAllocations(Allocations):
    """Allocations of CUDA's caching allocator.

    The parts of a moment are the sizes that were asked for; what `max_memory_allocated` has beside
    them are the ends of blocks. No GPU has run this.
    """

    OTHER = "ends of blocks"

    def with_host(self) -> AbstractContextManager[None]:
        """Leaves nothing out: CUDA's allocator hands out no memory of the host."""
        return nullcontext()

    def __init__(self, what: Callable[[], str]) -> None:
        super().__init__(what)
        self.peaks: list[int] = []

    def mark(self, moment: str) -> None:
        if self.inside:
            self._peak()
            super().mark(moment)
            torch.empty(1, device="cuda")  # what was freed before it belongs to the moment before

    def moments(self) -> Iterator[tuple[str, Held]]:
        for (name, held), peak in zip(super().moments(), self.peaks[1:], strict=True):
            rest = peak - sum(held.values())
            yield name, held | ({self.OTHER: rest} if rest > 0 else {})

    def _peak(self) -> None:
        """The most since the mark before."""
        self.peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def _stamp(self, note: int) -> None:
        torch.cuda.memory._set_memory_metadata(str(note))

    @contextmanager
    def _record(self, allocations: list[Allocated]) -> Iterator[None]:
        torch.cuda.init()
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
        try:
            yield
        finally:
            self._peak()
            traces = torch.cuda.memory._snapshot()["device_traces"]
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._set_memory_metadata("")
            allocations += cuda_changes(traces[torch.cuda.current_device()])


def cuda_changes(trace: Iterable[dict[str, Any]]) -> Iterator[Allocated]:
    """The record of a device's trace in `torch.cuda.memory._snapshot()`.

    A block counts as free from `free_requested` on, as `memory_allocated` has it.
    """
    for entry in trace:
        if entry["action"] == "alloc":
            text = entry.get("user_metadata") or ""
            note = int(text) if text.isdigit() else None
            yield Allocated(note, entry["addr"], entry["size"])
        elif entry["action"] == "free_requested":
            yield Allocated(None, entry["addr"], -entry["size"])


class Clock:
    """Seconds that a device computes, by part.

    On CUDA they are between events of the stream that computes, in which it may wait for the host.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.stamps: list[tuple[str, Any]] = []

    def start_part(self, part: str) -> None:
        """From here on another part runs."""
        if not self.stamps or self.stamps[-1][0] != part:
            self.stamps.append((part, self._now()))

    def _now(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spent(self) -> dict[str, float]:
        """Seconds of each part; the last one says where it ends."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        seconds: Counter[str] = Counter()
        for (part, start), (_, end) in itertools.pairwise(self.stamps):
            passed = end - start if self.device == "cpu" else start.elapsed_time(end) / 1e3
            seconds[part] += passed
        return dict(seconds)
