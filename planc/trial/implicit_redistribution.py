"""Redistributions that DTensor makes on its own because an operation needs another layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from planc.trial.trace import Trace, caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Implicit:
    """Args:
    module: that was running.
    line: of the model's own code.
    source, target: layouts, as a plan writes them.
    op: torch's name of the operation.
    before: the module without modules inside that ended last.
    """

    module: str
    line: str
    source: str
    target: str
    op: str
    before: str


@contextmanager
def redistributions(trace: Trace, styled: Collection[str], found: list[Implicit]) -> Iterator[None]:
    """Collects those that communicate, outside modules that carry a style: inside, it is the style.

    It listens where torch's `ExplicitRedistributionContext` does, which can only raise or warn, and
    says neither what is changed nor where.

    Args:
        trace: of the model that runs, to know what is running.
        styled: the modules that carry a style.
        found: receives them, each once.
    """
    from torch.distributed.tensor import _dispatch, _utils
    from torch.distributed.tensor._op_schema import OpSchema

    guard = getattr(_dispatch, "ExplicitRedistributionContext", None)
    cost = getattr(_utils, "redistribute_cost", None)
    if guard is None or cost is None:  # a torch without that guard
        yield
        return

    def observe(source: Any, target: Any, message: Any) -> None:
        running = trace.running[-1] if trace.running else ""
        if running in styled or cost(source, target) <= 0:
            return
        # torch passes its message as a LazyString, whose argument is the operation or its schema
        op = next(iter(getattr(message, "args", ())), "an operation")
        seen = Implicit(
            module=running,
            line=caller(),
            source=_layout(source),
            target=_layout(target),
            before=trace.leaf,
            op=str(op.op if isinstance(op, OpSchema) else op),
        )
        if seen not in found:
            found.append(seen)

    with patch.object(guard, "observe_redistribution", staticmethod(observe)):
        yield


def _layout(spec: Any) -> str:
    [placement, *_] = spec.placements
    if placement.is_replicate():
        return "replicate"
    return f"shard({placement.dim})" if placement.is_shard() else "partial"
