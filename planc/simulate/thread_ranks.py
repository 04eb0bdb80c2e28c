"""Runs the ranks of a process group as threads of this process.

Each rank runs the real program with a control flow of its own: `planc.apply`, FSDP and DTensor as
they are. The process group is the one that torch's own tests of FSDP2 and DTensor use
(`torch.testing._internal.distributed.multi_threaded_pg`, private; this file is its only user). It
is wrapped here so that every run ends: ranks that call different collectives, a rank that raises
while others wait for it, and ranks that all wait become errors.
"""

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import distributed

from planc.compat.collectives import _functional_collectives
from planc.compat.dtensor import _redistribute
from planc.simulate.random_numbers import RankGenerators
from planc.simulate.shared_propagation import shared_propagation
from planc.simulate.thread_messages import messages
from planc.simulate.turns import Turns

_POLL = 0.05  # seconds between two looks at the threads
_LOOKS = 5  # looks at which ranks wait, after another one has failed, until they are given up
_GRACE = 2.0  # seconds for waiting threads to end after another one has failed

_PATIENCE = 10  # looks at a rank that takes no processor time, until another one runs beside it
_IDLE = 60.0  # seconds after which ranks are given up that take no processor time
_IDLE_SHARE = 0.005  # of a processor, below which ranks take none: a busy machine leaves more


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Why the ranks did not end: what a rank (-1: none) raised first, or what they wait for;
    `late` if only their time was up.
    """

    error: Exception | None = None
    rank: int = -1
    message: str = ""
    late: bool = False


def busy() -> str:
    """Why no ranks can be started in this process now; empty if they can."""
    if distributed.is_initialized():
        return "a process group is running in this process"
    return ""


def run_ranks(count: int, program: Callable[[int], None], seconds: float) -> RankFailure | None:
    """Runs a program once for each rank, all in one process group.

    Args:
        count: the number of ranks.
        program: called with the rank, in a thread of its own; it may use `torch.distributed`.
        seconds: the limit for all of them, in seconds of processor time: a busy machine takes
            longer, and decides the same. Ranks that take no processor time for a minute are given
            up before.

    Returns:
        The failure, None if every rank ended. Threads that still run after the time limit are
        daemons, and end with the process.
    """
    store = distributed.HashStore()
    named = {"backend": "threaded", "world_size": count, "store": store}
    return _run_threads(range(count), named, program, seconds)


def run_alone(
    count: int, program: Callable[[int], None], seconds: float, rank: int = 0
) -> RankFailure | None:
    """Runs a program as one of `count` ranks, in torch's fake process group: its collectives return
    at once, and write nothing. Arguments and result as of `run_ranks`.
    """
    from planc.compat.fake_ranks import FakeStore

    named = {"backend": "fake", "world_size": count, "store": FakeStore()}
    return _run_threads([rank], named, program, seconds)


def _run_threads(
    ranks: Iterable[int], group: dict[str, Any], program: Callable[[int], None], seconds: float
) -> RankFailure | None:
    """Runs a program once for each rank; `group` are arguments of `init_process_group`."""
    failures, turns = list[RankFailure](), Turns()

    def body(rank: int) -> None:
        try:
            with turns.turn():
                distributed.init_process_group(rank=rank, **group)
                program(rank)
        except Exception as error:
            failures.append(RankFailure(error=error, rank=rank))
        except SystemExit:  # another rank has raised, and this one waited for it
            pass

    with _install_threads(turns) as (groups, waits):
        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in ranks]
        for thread in threads:
            thread.start()
        stopped = _join(threads, waits, failures, _Limit(seconds, _IDLE), turns)
        if stopped:
            _end_collectives(groups)
            turns.end()
            for thread in threads:
                thread.join(_GRACE)
    return failures[0] if failures else stopped


class _Limit:
    """A limit of the processor time of this process's other threads, and of their rest.

    Args:
        seconds: of processor time.
        idle: of looks at threads that take no processor time. Looks are counted instead of the
            clock, which runs on while the process is stopped.
    """

    def __init__(self, seconds: float, idle: float) -> None:
        self.seconds, self.idle = seconds, idle
        self.end = _of_others() + seconds
        self.looks, self.mark = 0, _of_others()

    def failure(self) -> RankFailure | None:
        """The failure if a limit has passed; called once for each look at the threads."""
        used = _of_others()
        if used > self.end:
            text = f"within the time limit of {self.seconds:g} seconds of processor time"
            return RankFailure(message=f"the ranks did not end {text}", late=True)
        self.looks += 1
        if used - self.mark > _IDLE_SHARE * self.idle:
            self.looks, self.mark = 0, used
        if self.looks * _POLL < self.idle:
            return None
        text = f"the ranks took no processor time for {self.idle:g} seconds"
        return RankFailure(message=f"{text}: the model's code waits", late=True)


def _of_others() -> float:
    """The processor time of all threads of this process but this one."""
    return time.process_time() - time.thread_time()


def _end_collectives(groups: Any) -> None:
    """Ends every collective that waits. torch looks through them without a lock, while ranks whose
    time is up begin others: it looks again then.
    """
    while True:
        try:
            groups.exception_handle(None)
            return
        except RuntimeError:  # dictionary changed size during iteration
            continue


@contextmanager
def without_logs() -> Iterator[None]:
    """Suppresses all logs: torch logs what it raises, too."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)


@contextmanager
def _install_threads(turns: Turns) -> Iterator[tuple[Any, dict[int, Any]]]:
    """Installs the process group of threads.

    Yields:
        Its class, and the collectives that threads have joined, by thread.
    """
    from planc.compat.thread_ranks import multi_threaded_pg

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    groups = multi_threaded_pg.ProcessLocalGroup
    waits: dict[int, Any] = {}
    groups.reset()
    # it has sizes of local shards by mesh, and a mesh by its thread, whose number is used again
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    isolate(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        with (
            warnings.catch_warnings(),
            without_logs(),
            mock.patch.object(groups, "_start_coll", _match_collectives(groups)),
            mock.patch.object(multi_threaded_pg.Collective, "join", _joining(groups, waits, turns)),
            mock.patch.object(multi_threaded_pg, "_store_based_barrier", _pausing(turns)),
            messages(groups, waits, turns),
            # collectives are done when they return; torch warns at exit of those not waited for
            mock.patch.object(_functional_collectives, "_maybe_wrap_tensor", _wait),
            mock.patch.object(torch.random, "default_generator", RankGenerators()),
            # init_process_group puts a rank before each line of every later traceback
            mock.patch.object(sys, "excepthook", sys.excepthook),
            shared_propagation(),
        ):
            warnings.simplefilter("ignore")
            yield groups, waits
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        isolate(False)


def _joining(groups: Any, waits: dict[int, Any], turns: Turns) -> Callable[[Any, int, Any], Any]:
    """`Collective.join`, which notes the collective while its thread is in it, and hands on the
    thread's turn where it waits.
    """
    from planc.compat.thread_ranks import ret_work

    def join(collective: Any, rank: int, data: Any) -> Any:
        with collective._start_cond:
            collective._data[rank] = data
            collective._count += 1

        def ready() -> bool:
            complete = collective._done if rank else collective._count == collective._world_size
            return bool(complete or groups._terminate.is_set())

        waits[threading.get_ident()] = collective
        try:
            turns.wait(ready)
            if groups._terminate.is_set():
                sys.exit("another rank has raised")
            if rank == 0:
                collective._collective.work(collective._data)
                collective._done = True
            return ret_work(data)
        finally:
            waits.pop(threading.get_ident())

    return join


def _pausing(turns: Turns) -> Callable[..., None]:
    """The wait for all ranks of a new group in its store, without a turn."""
    from planc.compat.thread_ranks import multi_threaded_pg

    barrier = multi_threaded_pg._store_based_barrier

    def wait(*args: Any, **kwargs: Any) -> None:
        with turns.pause():
            barrier(*args, **kwargs)

    return wait


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = _functional_collectives.wait_tensor(tensor)
    return waited


def _match_collectives(groups: Any) -> Callable[[Any, Any], Any]:
    """`_start_coll`, which gives ranks their common collective, with a check that it is the same
    one for all of them.
    """
    start = groups._start_coll

    def check_start(collective: Any, group: Any) -> Any:
        joined = start(collective, group)
        mine, other = type(collective).__name__, type(joined._collective).__name__
        if mine != other:
            raise RuntimeError(f"ranks call different collectives: {mine} here, {other} elsewhere")
        return joined

    return check_start


def _join(
    threads: list[threading.Thread],
    waits: Mapping[int, Any],
    failures: list[RankFailure],
    limit: _Limit,
    turns: Turns,
) -> RankFailure | None:
    """Waits for the threads; returns why they were given up (`waits` has their collectives), None
    if they ended. After a failure others run on to where they wait, so that more is known.
    """
    idle = 0
    while alive := [t for t in threads if t.is_alive()]:
        alive[0].join(_POLL)
        if late := limit.failure():
            return late
        if limit.looks and limit.looks % _PATIENCE == 0:
            turns.add(1)  # the rank whose turn it is waits for another by its own means
        idle = idle + 1 if failures and all(t.ident in waits for t in alive) else 0
        if idle == _LOOKS:
            return RankFailure(message="a rank failed")
        if _is_deadlock(alive, waits):
            text = "the ranks wait for each other: not all of them call the same collectives"
            return RankFailure(message=text)
    return None


def _is_deadlock(threads: list[threading.Thread], waits: Mapping[int, Any]) -> bool:
    """Whether every rank waits in a collective that has not all of its ranks.

    A rank may be on its way into a collective or out of it for as long as other work takes the
    processor, so time decides nothing: each collective must have counted every rank that waits.
    """
    joined = [waits.get(t.ident or 0) for t in threads if t.is_alive()]
    return bool(joined) and all(
        collective is not None
        and not collective._done
        and collective._count == joined.count(collective) < collective._world_size
        for collective in joined
    )
