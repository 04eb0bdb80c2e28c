"""The ranks of a job as they see each other through a store, without collectives: a rank that hangs
in one still says where, and one that is dead or stopped is missed.
"""

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore

from planc.diagnostics.diagnostic import Diagnostic, first_line, one_of
from planc.runtime.preconditions import problem

BEAT, QUIET = 0.5, 8.0
"""Seconds between two signs of life of a rank, and after which one without any is missed."""
_HELP = "look at that process and its node; the others were ended"


@dataclass(slots=True, kw_only=True)
class Peers:
    """This rank among all.

    Args:
        rank, world_size: by torchrun's variables.
        store: of all ranks, held by torchrun, else by rank 0.
        limit: seconds for everything; a rank that did not come by half of it is missed.
        missed: what rank 0 does with the findings about ranks that are missed, or rank 1 where
            rank 0 is.
        doing: what this rank does now.
    """

    rank: int
    world_size: int
    store: PrefixStore
    limit: float
    missed: Callable[[list[Diagnostic]], None]
    began: float = field(default_factory=time.monotonic)
    doing: str = "starting"
    _host: str = field(default_factory=socket.gethostname)
    _last: dict[int, tuple[int, float]] = field(default_factory=dict)
    _failed: float = 0.0
    _code: int | None = None
    _missed: set[int] = field(default_factory=set)
    _first: tuple[str, str] = ("", "")
    _answered: float = 0.0
    _telling: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begins to give signs of life, and to watch for those of others."""
        self.report_activity(self.doing)
        stores = [self.store.clone() for _ in range(2)]
        loops: list[Callable[[], None]] = [
            partial(self._beat, stores[0]),
            partial(self._watch, stores[1]),
            *([self._guard] if self.rank else []),
        ]
        for loop in loops:
            thread = threading.Thread(target=loop, daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def _quiet(self) -> float:
        """Seconds after which rank 0 is missed: rank 1 is the first to say so."""
        return QUIET if self.rank == 1 else 2 * QUIET

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def report_activity(self, doing: str) -> None:
        """Says what this rank does now."""
        self.doing = doing
        self.store.set(f"at/{self.rank}", json.dumps([doing, self._host]))

    def report_failure(self, error: str) -> None:
        """Says that this rank cannot go on; rank 0 ends all, unless it misses another rank first,
        which may be why.
        """
        self.store.set(f"failed/{self.rank}", f"{self.doing}: {error}")
        self.wait()

    def wait(self) -> None:
        """Waits for this process to be ended, by the watch of rank 0, or of this one where rank 0
        is missed.
        """
        self._ended.wait()

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks on rank 0; nothing elsewhere. A rank that does not give one in
        time is missed by the watch.
        """
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        if self.rank:
            return []
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        self.store.wait(keys, timedelta(seconds=self.limit + 2 * QUIET))
        return [json.loads(self.store.get(key)) for key in keys]

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Broadcasts a value of rank 0 to all ranks."""
        if self.rank == 0:
            self.store.set(name, json.dumps(value))
        self.store.wait([name], timedelta(seconds=self.limit + 2 * QUIET))
        return json.loads(self.store.get(name))

    def end(self, code: int, show: Callable[[], None]) -> int:
        """The exit code, which is that of rank 0 everywhere; `show` gives its report."""
        with self._telling:  # one report: the watch gives another where a rank is missed
            self._code = code
        if self.rank == 0:
            show()
            self._tell(code)
            self._ended.set()
        self._ended.wait()
        for thread in self._threads:  # one in the store while Python ends aborts the process
            thread.join()
        return self._code

    def _tell(self, code: int) -> None:
        """Gives the others time to read the code: the store may end with this process."""
        store = self.store.clone()
        store.set("code", str(code))
        others = {*range(1, self.world_size)} - {self.rank, *self._missed}
        left, until = [f"left/{rank}" for rank in others], time.monotonic() + QUIET
        while left and not store.check(left) and time.monotonic() < until:
            time.sleep(BEAT / 5)

    def _beat(self, store: PrefixStore) -> None:
        count = 0
        with suppress(RuntimeError):  # the watch says it
            while not self._ended.is_set():
                count += 1
                store.set(f"beat/{self.rank}", str(count))
                self._ended.wait(BEAT)

    def _watch(self, store: PrefixStore) -> None:
        try:
            while not (self._watch_all if self.rank == 0 else self._watch_first)(store):
                self._answered = self.seconds
                time.sleep(BEAT)
            self._answered = math.inf
        except RuntimeError as error:
            if self.rank == 0 and self._code is not None:
                return
            time.sleep(QUIET)  # a launcher that ends all ranks has done so by then
            self._stop([self._storeless(f"is gone ({first_line(error)})")])

    def _guard(self) -> None:
        """Ends this rank where the store stops to answer, as one that a stopped rank 0 holds: a
        call to it waits forever, so that the watch cannot say so. It makes no such call.
        """
        quiet = QUIET + self._quiet
        while not self._ended.wait(BEAT):
            if self.seconds > self._answered + quiet:
                self._stop([self._storeless(f"has not answered for {quiet:.0f} s")])

    def _storeless(self, how: str) -> Diagnostic:
        doing, host = self._first
        text = f"the store of all ranks {how}, and perhaps rank 0"
        text += f" on {host}, whose last word was: {doing}" if host else ""
        return problem("PL644", text, help=_HELP)

    def _watch_all(self, store: PrefixStore) -> bool:
        """Ends all ranks where one is missed; whether there is nothing more to watch."""
        with self._telling:
            if self._code is None and (findings := self._wrong(store)):
                self._stop(findings, store)
            return self._code is not None

    def _watch_first(self, store: PrefixStore) -> bool:
        """Ends this rank with the code of rank 0, or without where that is missed: rank 1 says so,
        and the others follow it.
        """
        if store.check(["code"]):
            ending, self._code = self._code is not None, int(store.get("code"))
            store.set(f"left/{self.rank}", "")
            if not ending:  # the main thread may wait in a collective
                os._exit(self._code)
            self._ended.set()
            return True
        self._first = self._last_action(store, 0)
        if findings := [*self._silent(store, [self._first], self._quiet)]:
            self._stop(findings, store)
        return False

    def _stop(self, findings: list[Diagnostic], store: PrefixStore | None = None) -> NoReturn:
        """Says why, and ends this process, and all others by the store."""
        try:
            if self.rank < 2:
                self.missed(findings)
            else:
                print(
                    *(finding.one_line for finding in findings),
                    sep="\n",
                    file=sys.stderr,
                    flush=True,
                )
            if store is not None:
                self._tell(1)
        finally:
            os._exit(1)

    def _wrong(self, store: PrefixStore) -> list[Diagnostic]:
        """Why not to wait any longer."""
        said = [self._last_action(store, rank) for rank in range(self.world_size)]
        if silent := [*self._silent(store, said, QUIET)]:
            return silent
        failed = [rank for rank in range(self.world_size) if store.check([f"failed/{rank}"])]
        self._failed = self._failed or (self.seconds if failed else 0.0)
        if failed and self.seconds > self._failed + QUIET + 2 * BEAT:  # none is missed
            errors = {rank: store.get(f"failed/{rank}").decode() for rank in failed}
            return [
                problem("PL645", f"rank {rank} on {said[rank][1]} failed at {error}", help=_HELP)
                for rank, error in errors.items()
            ]
        if self.seconds < self.limit:
            return []
        at = [doing for doing, _ in said]
        return [
            problem(
                "PL644",
                f"not done after {self.limit:.0f} s: {doing}, on {_some(at, doing)}",
                help=_HELP,
            )
            for doing in dict.fromkeys(at)
        ]

    def _last_action(self, store: PrefixStore, rank: int) -> tuple[str, str]:
        """The last action of a rank, and its node; empty if it never came."""
        doing, host = json.loads(store.get(key)) if store.check([key := f"at/{rank}"]) else ("", "")
        return doing, host

    def _silent(
        self, store: PrefixStore, said: list[tuple[str, str]], quiet: float
    ) -> Iterator[Diagnostic]:
        """The ranks that are missed, by what the first of all said last.

        Args:
            quiet: seconds after which one is missed.
        """
        for rank, (doing, host) in enumerate(said):
            known = store.check([key := f"beat/{rank}"])
            count = int(store.get(key)) if known else 0
            before, since = self._last.setdefault(rank, (count, self.seconds))
            if count != before:
                self._last[rank] = count, self.seconds
            elif known and self.seconds - since > quiet:
                self._missed.add(rank)
                text = f"rank {rank} on {host} gives no sign of life; its last was at: {doing}"
                yield problem("PL644", text, help=_HELP)
            elif not known and self.seconds > self.limit / 2 + quiet - QUIET:
                self._missed.add(rank)
                text = f"rank {rank} never came: no word of it in {self.limit / 2:.0f} s"
                yield problem("PL644", text, help=_HELP)


def _some(values: list[str], value: str) -> str:
    ranks = [str(rank) for rank, other in enumerate(values) if other == value]
    return f"rank{'s' * (len(ranks) > 1)} {one_of(ranks[:6], last='and')}"


def join(limit: float, missed: Callable[[list[Diagnostic]], None]) -> Peers:
    """The ranks that torchrun's variables name.

    Raises:
        RuntimeError: no store answers at MASTER_ADDR in time.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not torchruns,
        timeout=timedelta(seconds=limit / 3),  # it tries twice
        wait_for_workers=False,
    )
    # a store of torchrun's outlives a start; starts are not counted alike on all nodes
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if torchruns else "0"
    prefixed = PrefixStore(f"planc/preflight/{attempt}", store)
    peers = Peers(rank=rank, world_size=world_size, store=prefixed, limit=limit, missed=missed)
    peers.start()
    return peers
