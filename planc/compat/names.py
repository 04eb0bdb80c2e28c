"""The refusal of a library that lacks a name that planc uses."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from inspect import unwrap
from types import FunctionType
from typing import Any

from planc.diagnostics.diagnostic import PlanError, Sink

_LACKING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


@contextmanager
def private_names(library: str) -> Iterator[None]:
    """Refuses a library where an import inside the block finds a module or a name missing.

    Args:
        library: its name on PyPI. Where it is not installed at all, Python's own error stays.

    Raises:
        PlanError: PL743.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = library.replace("-", "_")
        if error.name is None or not error.name.startswith(f"{package}."):
            raise
        raise _refusal(library, error.name) from error
    except ImportError as error:
        match = _LACKING.match(str(error))
        if match is None:  # a shared library that cannot be loaded
            raise
        raise _refusal(library, f"{match[2]}.{match[1]}") from error


def require(library: str, owner: Any, *names: str) -> None:
    """Checks that a module or a class has private attributes.

    Raises:
        PlanError: PL743, at the first that it lacks.
    """
    for name in names:
        if not hasattr(owner, name):
            place = owner.__name__
            if isinstance(owner, type):
                place = f"{owner.__module__}.{owner.__qualname__}"
            raise _refusal(library, f"{place}.{name}")


def require_assigned(library: str, owner: type, *names: str) -> None:
    """Checks that the methods of a class know attributes that its objects get as they are made.

    Raises:
        PlanError: PL743, at the first that none of them names.
    """
    methods = [unwrap(m) for base in owner.__mro__ for m in vars(base).values() if callable(m)]
    known = {n for m in methods if isinstance(m, FunctionType) for n in m.__code__.co_names}
    for name in names:
        if name not in known:
            raise _refusal(library, f"{owner.__module__}.{owner.__qualname__}.{name}")


def missing_name(error: BaseException | None) -> PlanError | None:
    """The refusal of a library (PL743) among an error and its causes."""
    while error is not None:
        if isinstance(error, PlanError) and any(d.code == "PL743" for d in error.diagnostics):
            return error
        error = error.__cause__
    return None


def _refusal(library: str, name: str) -> PlanError:
    sink = Sink()
    sink.error(
        "PL743",
        f"{library} {metadata.version(library)} has no `{name}`, which planc uses",
        help="`pip install planc` installs versions that planc is tested with",
    )
    return PlanError(sink)
