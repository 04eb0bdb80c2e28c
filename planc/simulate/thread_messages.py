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
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import distributed

from planc.simulate.turns import Turns


class _Run(NamedTuple):
    """The process group of a run, what its threads wait for, and whose turn it is."""

    groups: Any
    waits: dict[int, Any]
    turns: Turns


class _Channel:
    """The messages of one pair of ranks in one group, in order."""

    def __init__(self) -> None:
        self.sent: dict[int, torch.Tensor] = {}
        self.count = self.posted = 0

    def put(self, tensor: torch.Tensor) -> None:
        self.sent[self.count] = tensor
        self.count += 1


class _Receive(distributed.Work):  # type: ignore[misc]
    """A receive that was posted. Its fields are those of torch's collective of threads, which tell
    whether its thread waits in vain.
    """

    _count, _world_size = 1, 2

    def __init__(self, channel: _Channel, tensor: torch.Tensor, run: _Run) -> None:
        super().__init__()
        self.channel, self.tensor, self.run = channel, tensor, run
        self.number, channel.posted = channel.posted, channel.posted + 1
        self.taken = False

    @property
    def _done(self) -> bool:
        return self.taken or self.number in self.channel.sent

    def wait(self, timeout: Any = None) -> bool:
        if self.taken:
            return True
        ended, waits = self.run.groups._terminate, self.run.waits
        waits[threading.get_ident()] = self
        try:
            self.run.turns.wait(lambda: self._done or ended.is_set())
            if not self._done:
                sys.exit("another rank has raised")
            self.taken, sent = True, self.channel.sent.pop(self.number)
        finally:
            waits.pop(threading.get_ident(), None)
        with torch.no_grad():
            self.tensor.detach().copy_(sent)
        return True


@contextmanager
def messages(groups: Any, waits: dict[int, Any], turns: Turns) -> Iterator[None]:
    """Gives the process group of threads `send` and `recv`; `waits` tells what threads wait for."""
    run = _Run(groups, waits, turns)
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
        return _Receive(channel(group, source, group._rank), tensor, run)

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
