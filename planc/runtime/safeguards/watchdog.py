"""Writes what a rank waits for, if it has not moved for some time, ends with an error, or is
stopped by SIGTERM, as torchrun stops the other ranks if one dies.

torch keeps the last collectives of a process in its flight recorder, for gloo as for NCCL, so a
training step pays nothing. A thread reads how far each group has come; where no group moves, it
writes the recorder, the names and the ranks of the groups, and the stack of the main thread. It
ends nothing: a rank that reads data for long looks the same, and goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from planc.compat.collectives import _distributed_c10d as recorder
from planc.compat.collectives import distributed_c10d
from planc.files.atomic_write import write
from planc.ops.lowered import Lowered

FOLDER = "PLANC_HANG_DIR"
"""The environment variable that names the folder, which is `planc-hang` without it."""
_POLLS = 60  # in the time without movement
_OTHERS = 30.0  # seconds that other ranks get to write what they have
_MESSAGES = 200  # of the last ones that are kept


def require_usable(seconds: float) -> None:
    """Checks the time of a watchdog, in seconds.

    Raises:
        TypeError: it is no number.
        ValueError: it is none above 0, or torch records nothing.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"watchdog is a number of seconds, not {seconds!r}")
    if not seconds > 0:
        raise ValueError(f"watchdog is a number of seconds above 0, not {seconds!r}")
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "").strip() == "0":
        raise ValueError("watchdog reads what torch records: TORCH_FR_BUFFER_SIZE=0 turns it off")


class Watchdog(threading.Thread):
    """A thread that writes what this rank waits for.

    Args:
        lowered, digest: the plan, which the file names.
        seconds: without movement, after which it writes.

    Attributes:
        folder: that the files of all ranks are written into.
    """

    def __init__(self, lowered: Lowered, digest: str, seconds: float) -> None:
        super().__init__(name="planc watchdog", daemon=True)
        self.lowered, self.digest, self.seconds = lowered, digest, seconds
        self.folder = Path(os.environ.get(FOLDER, "planc-hang")).absolute()
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.group = id(distributed.group.WORLD)  # no reference: its script ends it
        self.ended = threading.Event()
        self.ending = threading.Lock()
        self.messages = Messages() if lowered.pipeline and _by_gloo() else None
        self.hook = sys.excepthook
        sys.excepthook = self._write_error
        self._forget()
        self.stop_signal = StopSignal(self._write_stop)

    def run(self) -> None:
        last, since, written = self._progress(), time.monotonic(), False
        while not self.ended.wait(self.seconds / _POLLS):
            if id(distributed.group.WORLD) != self.group:  # the script has ended its groups
                self.end()
                return
            now = self._progress()
            if now != last:
                last, since = now, time.monotonic()
                if written:
                    written = self._forget()
                    self._say(f"rank {self.rank} moves again, and has removed its file")
            elif not written and time.monotonic() - since > self.seconds:
                written = True
                self._write()
                self._tell(f"no collective has moved for {self.seconds:g} s")

    def end(self) -> None:
        self.ended.set()
        if sys.excepthook == self._write_error:
            sys.excepthook = self.hook
        self.stop_signal.end()
        if self.messages:
            self.messages.end()

    def _write_error(self, kind: Any, error: Any, trace: Any) -> None:
        """Writes the stack of this rank when it raises. The error may be its own, or that of a
        library because another rank has ended.
        """
        self.hook(kind, error, trace)
        if self.ended.is_set() or id(distributed.group.WORLD) != self.group:
            return
        with self.ending:
            self.ended.set()
            self._write(f"{kind.__name__}: {error}", traceback.extract_tb(trace))
        self._tell(f"rank {self.rank} has ended with an error")

    def _write_stop(self) -> None:
        """Writes the stack of this rank when it is stopped, unless it has written an error."""
        with self.ending:
            if not self.ended.is_set() and id(distributed.group.WORLD) == self.group:
                self.ended.set()
                self._write("SIGTERM")

    def _progress(self) -> Any:
        """A value that changes when a collective of any process group, or a message, completes."""
        status = pickle.loads(_dump(collectives=False))["pg_status"]
        return status, self.messages and self.messages.count

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.json"

    def _forget(self) -> bool:
        """Removes this rank's files, also of an earlier run; returns False, for `written`."""
        for path in (self._path(self.rank), self._path(self.rank).with_suffix(".pickle")):
            path.unlink(missing_ok=True)
        return False

    def _write(self, error: str = "", frames: Any = None) -> None:
        if frames is None:
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            frames = traceback.extract_stack(main) if main else []
        about = {
            "rank": self.rank,
            "world_size": self.size,
            "plan": self.lowered.plan,
            "digest": self.digest,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "seconds": self.seconds,
            "error": error,
            "groups": dict(_groups()),
            "messages": self.messages.document() if self.messages else [],
            "stack": [f"{f.filename}:{f.lineno} {f.name}" for f in frames],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path(self.rank).with_suffix(".pickle").write_bytes(_dump(collectives=True))
        write(self._path(self.rank), json.dumps(about))  # last, and at once: others look for it

    def _tell(self, why: str) -> None:
        """Waits for other ranks' files; then the first rank with a file reports which exist."""
        limit = time.monotonic() + min(_OTHERS, self.seconds)
        while time.monotonic() < limit and not all(map(self._there, range(self.size))):
            time.sleep(0.2)
        there = [rank for rank in range(self.size) if self._there(rank)]
        if there and self.rank != there[0]:
            return
        absent = [str(rank) for rank in range(self.size) if rank not in there]
        without = f"; no file of rank {', '.join(absent)}" if absent else ""
        self._say(
            f"{why}: {len(there)} of {self.size} ranks wrote what they wait for to {self.folder}"
            f"{without}. `planc hang {self.folder} MODEL PLAN` lays it beside the plan"
        )

    def _there(self, rank: int) -> bool:
        return self._path(rank).exists()

    def _say(self, text: str) -> None:
        print(f"planc: {text}", file=sys.stderr, flush=True)


def _dump(*, collectives: bool) -> bytes:
    """torch's recorder, as it writes it: NCCL's own, where that is used."""
    own = getattr(recorder, "_dump_nccl_trace", None)
    dump = own if own and not _by_gloo() else recorder._dump_fr_trace  # type: ignore[attr-defined]
    made: bytes = dump(includeCollectives=collectives, includeStackTraces=collectives)
    return made


def _by_gloo() -> bool:
    return not torch.cuda.is_available() or distributed.get_backend() == "gloo"


def _groups() -> Iterator[tuple[str, list[int]]]:
    """The name of each group of this rank, and its ranks."""
    world = distributed_c10d._world
    for group in list(world.pg_map):
        yield world.pg_names[group], distributed.get_process_group_ranks(group)


class StopSignal:
    """Calls a function if the process gets SIGTERM, and then ends it as SIGTERM does by default.

    A thread calls the function, because the main thread may wait in a collective, where Python runs
    no signal handler. Without effect outside the main thread, where it cannot be installed, and if
    the script handles SIGTERM or has a wakeup descriptor of its own.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.installed = False
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        previous = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            os.close(self.reader)
            os.close(self.writer)
            return
        signal.signal(signal.SIGTERM, self._wait_for_thread)
        self.installed = True
        threading.Thread(target=self._listen, name="planc stop signal", daemon=True).start()
        # a worker of a data loader gets SIGTERM too, and would write into this pipe
        os.register_at_fork(after_in_child=self._uninstall)

    def end(self) -> None:
        """Restores the default; outside the main thread the function is no longer called."""
        self.function = lambda: None
        if threading.current_thread() is threading.main_thread():
            self._uninstall()

    def _uninstall(self) -> None:
        if self.installed:
            self.installed = False
            if signal.getsignal(signal.SIGTERM) == self._wait_for_thread:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            os.close(self.writer)  # ends the thread

    def _wait_for_thread(self, number: int, frame: Any) -> None:
        """Lets the thread write before the script goes on."""
        time.sleep(_OTHERS)

    def _listen(self) -> None:
        while received := os.read(self.reader, 64):
            if signal.SIGTERM in received:
                try:
                    self.function()
                finally:
                    # of C: that of Python is for the main thread alone
                    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
                    os.kill(os.getpid(), signal.SIGTERM)
        os.close(self.reader)


class Messages:
    """The last messages of this rank, which torch does not record on gloo.

    Attributes:
        count: of those that began and of those that ended.
    """

    def __init__(self) -> None:
        self.kept: deque[dict[str, Any]] = deque(maxlen=_MESSAGES)
        self.count = 0
        self.plain = {name: getattr(distributed.ProcessGroup, name) for name in ("send", "recv")}
        for name, plain in self.plain.items():
            setattr(distributed.ProcessGroup, name, self._noting(name, plain))

    def end(self) -> None:
        for name, plain in self.plain.items():
            setattr(distributed.ProcessGroup, name, plain)

    def _noting(self, kind: str, plain: Any) -> Any:
        def start(group: Any, tensors: Any, peer: int, *rest: Any) -> _Message:
            ranks = distributed.get_process_group_ranks(group)
            noted = {
                "kind": kind,
                "peer": ranks[peer],
                "ranks": ranks,
                "numel": tensors[0].numel(),
                "dtype": str(tensors[0].dtype).removeprefix("torch."),
                "state": "began",
            }
            self.kept.append(noted)
            self.count += 1
            return _Message(plain(group, tensors, peer, *rest), noted, self)

        return start

    def document(self) -> list[dict[str, Any]]:
        return list(self.kept)


class _Message:
    """The work of a message."""

    def __init__(self, work: Any, noted: dict[str, Any], messages: Messages) -> None:
        self.work, self.noted, self.messages = work, noted, messages

    def wait(self, *args: Any) -> Any:
        self.noted["state"] = "awaited"
        done = self.work.wait(*args)
        self.noted["state"] = "done"
        self.messages.count += 1
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)
