"""The time limit of a simulation, which `planc check --time-limit` sets."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SECONDS = 300.0
"""The default, in seconds of processor time: the verdict does not depend on the machine's load."""

_seconds = ContextVar("seconds", default=SECONDS)


def time_limit() -> float:
    """The limit of simulations that begin now, in seconds of processor time."""
    return _seconds.get()


@contextmanager
def limit_simulations(seconds: float) -> Iterator[None]:
    """Sets the limit of the simulations that begin inside."""
    token = _seconds.set(seconds)
    try:
        yield
    finally:
        _seconds.reset(token)
