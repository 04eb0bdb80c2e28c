"""Turns of the ranks of a simulation: one of them runs at a time, until it waits for another.

Threads that run at once compete for Python's interpreter, and are woken only to wait again. A rank
that waits says what it waits for, and hands its turn to one that can run.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """The turns of all ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free, self._ended = 1, False
        self._waiting: list[tuple[Callable[[], bool], threading.Lock]] = []

    def wait(self, ready: Callable[[], bool]) -> None:
        """Hands on the turn of this thread until a condition holds, which other ranks change."""
        if not ready():
            self._await(ready, freed=1)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Runs the block in a turn; none begins after the end."""
        self._await(lambda: True, freed=0)
        try:
            if self._ended:
                sys.exit("another rank has raised")
            yield
        finally:
            self.add(1)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Runs the block, which waits for other ranks in its own way, without a turn."""
        self.add(1)
        try:
            yield
        finally:
            self._await(lambda: True, freed=0)

    def add(self, count: int) -> None:
        """Adds turns, each for a rank that can run."""
        with self._lock:
            self._free += count
            self._hand_out()

    def end(self) -> None:
        """Lets all ranks that have begun run."""
        self._ended = True
        self.add(sys.maxsize)

    def _await(self, ready: Callable[[], bool], *, freed: int) -> None:
        turn = threading.Lock()
        turn.acquire()
        with self._lock:
            self._waiting.append((ready, turn))
            self._free += freed
            self._hand_out()
        turn.acquire()

    def _hand_out(self) -> None:
        for place in [*self._waiting]:
            ready, turn = place
            if self._free and ready():
                self._waiting.remove(place)
                self._free -= 1
                turn.release()
