"""Work on a checkpoint in a thread of its own, while training goes on.

torch's `async_save` cannot copy shards that are stored as blocks, and writes into the folder
itself, where a crash leaves half a checkpoint in the place of the previous one.
"""

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from planc.compat.trees import tree_map
from planc.diagnostics.diagnostic import Diagnostic, PlanError, first_line
from planc.runtime.preconditions import problem
from planc.runtime.standalone.dcp_chunks import Pieces

_log = logging.getLogger("planc")


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state on the CPU, which later steps do not change; shards keep their places."""
    copied: dict[str, Any] = tree_map(_copy, state)
    return copied


def _copy(value: Any) -> Any:
    if isinstance(value, Pieces):
        return value.with_part(value.part.detach().to("cpu", copy=True))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


class Background:
    """At most one piece of work at a time, which every rank does in a process group of its own."""

    def __init__(self) -> None:
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._failed: tuple[Diagnostic, ...] = ()

    def start(self, work: Callable[[Any], None], what: str) -> None:
        """Begins; every rank calls it, after `finish`.

        Args:
            work: called in the thread with the process group.
            what: of the message, if anything but a `PlanError` is raised.
        """
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")

        def run() -> None:
            try:
                with torch.no_grad():
                    work(self._group)
            except PlanError as error:
                self._failed = tuple(error.diagnostics)
            except Exception as error:  # another rank has ended
                self._failed = (problem("PL497", f"{what}: {first_line(error)}"),)
            for each in self._failed:  # the script may never ask
                _log.error("%s: %s", each.code, each.message)

        self._thread = threading.Thread(target=run, name="planc save")
        self._thread.start()

    def finish(self) -> None:
        """Waits for what was begun.

        Raises:
            PlanError: it failed; raised once, on every rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, ()
        if failed:
            raise PlanError(failed)
