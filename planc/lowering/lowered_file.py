"""A lowered plan from a file, for a run that may ask for something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.ops.document import loads
from planc.ops.lowered import Lowered


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredFile:
    """A lowered plan and the name of its file, for messages."""

    name: str
    lowered: Lowered


def read(path: str, sink: Sink) -> LoweredFile | None:
    """The lowered plan of a JSON file, or None after PL006 (can't be read) or PL007."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        sink.error("PL006", f"cannot read {path}: {(error.strerror or str(error)).lower()}")
        return None
    lowered = loads(text, path, sink)
    return None if lowered is None else LoweredFile(name=path, lowered=lowered)


def fitted(
    file: LoweredFile,
    facts: Facts | None,
    world_size: int | None,
    settings: Sequence[str],
    sink: Sink,
) -> Lowered | None:
    """The lowered plan, or None where it is not for this run.

    Args:
        file: what `read` gave.
        facts: the model that it is meant for, None where that could not be read.
        world_size: the number of ranks that was asked for; a lowered plan has one of its own.
        settings: what was to be set; nothing of a lowered plan can be.
        sink: receives PL106, PL301 and PL650.
    """
    path, lowered = file.name, file.lowered
    errors = sink.errors
    for setting in settings:
        sink.error(
            "PL106",
            f"`--set {setting}` changes nothing: {path} is lowered already",
            help="set it where the plan is lowered",
        )
    if world_size not in (None, lowered.world_size):
        sink.error(
            "PL301",
            f"{path} is lowered for {lowered.world_size:,} ranks, not {world_size:,}",
            help="lower the plan again for this world size",
        )
    if facts is not None and facts.name != lowered.model:
        sink.error(
            "PL650",
            f"{path} is lowered for {lowered.model}, the model is {facts.name}",
            help="lower the plan again for this model",
        )
    return lowered if facts is not None and sink.errors == errors else None
