"""Send and receive between ranks that are threads, which torch's process group of threads lacks.

A message goes from one rank to another in a group. The n-th receive that is posted takes the n-th
message that is sent, whichever is waited for first: matched when they are waited for, schedules
that post several receives get each other's.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed

_POLL = 0.05  # seconds between two looks whether the run has ended


class _Channel:
    """The messages of one pair of ranks in one group, in order."""

    def __init__(self) -> None:
        self.arrival = threading.Condition()
        self.sent: dict[int, torch.Tensor] = {}
        self.count = self.posted = 0

    def put(self, tensor: torch.Tensor) -> None:
        with self.arrival:
            self.sent[self.count] = tensor
            self.count += 1
            self.arrival.notify_all()


class _Receive(distributed.Work):  # type: ignore[misc]
    """A receive that was posted. Its fields are those of torch's collective of threads, which tell
    whether its thread waits in vain.
    """

    _count, _world_size = 1, 2

    def __init__(self, channel: _Channel, tensor: torch.Tensor, groups: Any, waits: Any) -> None:
        super().__init__()
        self.channel, self.tensor, self.groups, self.waits = channel, tensor, groups, waits
        self.number, channel.posted = channel.posted, channel.posted + 1
        self.taken = False

    @property
    def _done(self) -> bool:
        return self.taken or self.number in self.channel.sent

    def wait(self, timeout: Any = None) -> bool:
        if self.taken:
            return True
        self.waits[threading.get_ident()] = self
        try:
            with self.channel.arrival:
                while self.number not in self.channel.sent:
                    if self.groups._terminate.is_set():
                        sys.exit("another rank has raised")
                    self.channel.arrival.wait(_POLL)
                found = self.channel.sent.pop(self.number)
                self.taken = True
        finally:
            self.waits.pop(threading.get_ident(), None)
        with torch.no_grad():
            self.tensor.detach().copy_(found)
        return True


@contextmanager
def messages(groups: Any, waits: dict[int, Any]) -> Iterator[None]:
    """Gives the process group of threads `send` and `recv`; `waits` tells what threads wait for."""
    from planc.compat.thread_ranks import ret_work

    lock = threading.Lock()
    channels: dict[tuple[str, int, int], _Channel] = defaultdict(_Channel)

    def channel(group: Any, source: int, target: int) -> _Channel:
        with lock:
            return channels[group.pg_name, source, target]

    def send(group: Any, tensors: list[torch.Tensor], target: int, _tag: int = 0) -> Any:
        (tensor,) = tensors
        channel(group, group._rank, target).put(tensor.detach().clone())
        return ret_work(tensors)

    def recv(group: Any, tensors: list[torch.Tensor], source: int, _tag: int = 0) -> Any:
        (tensor,) = tensors
        return _Receive(channel(group, source, group._rank), tensor, groups, waits)

    def batch(ops: list[Any]) -> list[Any]:
        """`batch_isend_irecv`, which asks the group for a backend that threads do not have."""
        return [op.op(op.tensor, group=op.group, tag=op.tag, **_peer(op)) for op in ops]

    with (
        mock.patch.object(groups, "send", send),
        mock.patch.object(groups, "recv", recv),
        mock.patch.object(distributed, "batch_isend_irecv", batch),
    ):
        yield


def _peer(op: Any) -> dict[str, int]:
    sends = op.op is distributed.isend
    return {"group_dst" if sends else "group_src": op.group_peer}
