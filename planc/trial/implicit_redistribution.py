"""Records implicit redistributions: those that DTensor makes because an op needs another layout."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import distributed

from planc.trial.trace import Trace, caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Implicit:
    """An implicit redistribution.

    Args:
        module: the module that was running.
        line: the line of the model's code.
        source, target: the layouts, in the syntax of a plan.
        op: torch's name of the op.
        before: the leaf module that ended last.
    """

    module: str
    line: str
    source: str
    target: str
    op: str
    before: str


@contextmanager
def redistributions(
    current: Callable[[], Trace | None], styled: Collection[str], found: list[Implicit]
) -> Iterator[None]:
    """Records redistributions of rank 0 that communicate, outside of modules with a style.

    It hooks torch's `ExplicitRedistributionContext`, which by itself only raises or warns,
    without the tensor or the place.

    Args:
        current: gives the trace of the running model, None before it runs.
        styled: the modules with a style, whose redistributions are intended.
        found: receives each redistribution once.
    """
    from torch.distributed.tensor import _dispatch, _utils
    from torch.distributed.tensor._op_schema import OpSchema

    guard = getattr(_dispatch, "ExplicitRedistributionContext", None)
    cost = getattr(_utils, "redistribute_cost", None)
    if guard is None or cost is None:  # this torch has no such hook
        yield
        return

    def observe(source: Any, target: Any, message: Any) -> None:
        trace = current()
        if trace is None or not trace.watching or distributed.get_rank() != 0:
            return
        running = trace.running[-1] if trace.running else ""
        if running in styled or cost(source, target) <= 0:
            return
        # torch passes a LazyString whose argument is the op or its schema
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
