"""Checkpoints in the emitted Python: the wrapper's arguments, and the helpers that they call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

from planc.emit.python import Group, Source, quoted
from planc.lowering.ops import AnyOp, Checkpoint
from planc.share import RUNTIME

_TYPES = re.compile(
    r"(?:: (?=Any|bool|str|dict)| -> )(?:Any|bool|str|None|dict\[\w+, \w+\])(?=[,)=: \n])"
)
_DEFAULTS = re.compile(r"(\b\w+) = ([^\s,()]+|\(\))(?=[,)].*:\n)")
"""A default loses the spaces around its sign with its type."""
_WAIVERS = re.compile(r"  # type: ignore.*")


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


def helpers(ops: Iterable[AnyOp]) -> str:
    """The functions that the checkpoints of a script call; empty where they need none."""
    own = [op for op in ops if isinstance(op, Checkpoint)]
    uses = {
        "Saving": any(op.save for op in own),
        "Offload": any(op.offload for op in own),
        "Both": any(op.save and op.offload for op in own),
    }
    return "\n\n".join(part for name, part in _parts().items() if uses.get(name))


@cache
def _parts() -> dict[str, str]:
    """The chapters of the runtime's own text, so that a script does the same to the letter."""
    text = (RUNTIME / "remat.py").read_text(encoding="utf-8")
    _, *chapters = _WAIVERS.sub("", text).split("\n# ")
    parts = {}
    for chapter in chapters:
        head, _, body = chapter.partition("\n")
        body = _DEFAULTS.sub(r"\1=\2", _TYPES.sub("", body))
        parts[head.split()[0]] = body.strip("\n") + "\n"
    return parts
