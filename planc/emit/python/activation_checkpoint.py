"""Checkpoints in the emitted Python: the arguments of the wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planc.emit.python.printer import Group, Source, quoted
from planc.ops.activation_checkpoint import Checkpoint


def arguments(op: Checkpoint) -> tuple[Source, ...]:
    """What `checkpoint_wrapper` is given beside the module."""
    how = "checkpoint_impl=CheckpointImpl.NO_REENTRANT"
    options = tuple(_options(op))
    if not op.offload:
        return (how, *options)
    return (how, Group("checkpoint_fn=offloading(", (f"pin={op.pin}", *options)))


def _options(op: Checkpoint) -> Iterable[Source]:
    if op.save:
        groups = tuple(
            Group("(", (str(s.every), Group("(", tuple(quoted(n) for n in s.ops), _end(s.ops))))
            for s in op.save
        )
        kind = ("saving_on_cpu", (str(op.pin),)) if op.offload else ("saving", ())
        yield Group(f"context_fn={kind[0]}(", (*kind[1], *groups))
    if not op.preserve_rng:
        yield "preserve_rng_state=False"
    if not op.early_stop:
        yield "early_stop=False"


def _end(items: Sequence[str]) -> str:
    """How a tuple ends."""
    return ",)" if len(items) == 1 else ")"
