"""A lowered plan from a file, and whether it fits a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planc.diagnostics.diagnostic import Sink, io_reason
from planc.model.facts import Facts
from planc.ops.document import loads
from planc.ops.lowered import Lowered


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredFile:
    """A lowered plan and the name of its file, for messages."""

    name: str
    lowered: Lowered


def read(path: str, sink: Sink) -> LoweredFile | None:
    """The lowered plan in a JSON file, or None after PL006 (unreadable) or PL007."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        sink.error("PL006", f"cannot read {path}: {io_reason(error)}")
        return None
    lowered = loads(text, path, sink)
    return None if lowered is None else LoweredFile(name=path, lowered=lowered)


def fit(
    file: LoweredFile,
    facts: Facts | None,
    world_size: int | None,
    settings: Sequence[str],
    sink: Sink,
) -> Lowered | None:
    """The lowered plan of a file, or None (PL106, PL301, PL650) where it does not fit this run: its
    model, None if unread, its ranks, None for the plan's, and its `--set` arguments, all errors.
    """
    path, lowered = file.name, file.lowered
    errors = sink.errors
    for setting in settings:
        message = f"`--set {setting}` changes nothing: {path} is lowered already"
        sink.error("PL106", message, help="set it where the plan is lowered")
    if world_size not in (None, lowered.world_size):
        message = f"{path} is lowered for {lowered.world_size:,} ranks, not {world_size:,}"
        sink.error("PL301", message, help="lower the plan again for this world size")
    if facts is not None and facts.name != lowered.model:
        message = f"{path} is lowered for {lowered.model}, the model is {facts.name}"
        sink.error("PL650", message, help="lower the plan again for this model")
    return lowered if facts is not None and sink.errors == errors else None
