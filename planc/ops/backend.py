"""Backends: libraries that shard the whole model, instead of torch's FSDP.

The word of `backend = WORD` in a plan is a key of `planc.sections.BACKENDS`, or the name of an
entry point of the group `planc.backends` in another package. `part` returns the other modules of a
backend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from planc.model.facts import Modules
from planc.ops import base, call
from planc.ops.fsdp import FullyShard
from planc.sections import BACKENDS, Hook

GROUP = "planc.backends"


def names() -> tuple[str, ...]:
    """The words of all backends, none of which is imported."""
    return tuple(dict.fromkeys((*BACKENDS, *_entry_points())))


@cache
def _entry_points() -> Mapping[str, Any]:
    """The entry points of installed packages by their words. The current folder is not searched:
    no package is installed there.
    """
    from importlib.metadata import distributions  # slow to import

    here = Path.cwd()
    folders = [folder for folder in sys.path if folder and Path(folder).resolve() != here]
    entries = (e for d in distributions(path=folders) for e in d.entry_points if e.group == GROUP)
    return {entry.name: entry for entry in reversed([*entries])}


@cache
def backend(word: str) -> type[Backend]:
    """The class of a backend of planc, or of an installed package."""
    kind = _BACKEND.find(BACKENDS.get(word, ""))
    loaded: type[Backend] = kind or _entry_points()[word].load()
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend(base.Op):
    """The one call of a backend.

    Args:
        members: the modules that are units; all other parameters are sharded outside of units.
        shard: the axes that parameters are sharded over.
        replicate: the axes that shards are replicated over.
        nbytes: bytes that one rank holds at rest, including the optimizer's main weights.
        gathered: bytes of the largest unit while it is all-gathered.
    """

    SCRIPT: ClassVar = call.ScriptFunction("shard", "Shards the model.")

    def uncounted_traffic(self, step: base.StepFacts) -> str:
        return f"what {self.TITLE} gathers and reduces"

    PHASE: ClassVar = base.Phase.SHARD
    WORD: ClassVar = "backend"
    TITLE: ClassVar[str]
    """The name of the library, for messages."""
    FUNCTION: ClassVar[str]
    """The function that is called, for messages."""
    UNPROVED: ClassVar[str]
    """Why a simulation proves nothing of it."""
    SIMULATION: ClassVar = base.SimulationKind.NEVER  # it may need a device
    ROLE: ClassVar = base.AxisRole.DATA
    SETTINGS: ClassVar[tuple[str, ...]]
    """The settings and directives of an fsdp section that it alone has."""

    members: base.Some[Modules]
    shard: base.Some[base.Axis]
    replicate: base.Axes = ()
    nbytes: base.Count = 0
    gathered: base.Count = 0

    @classmethod
    def all_installed(cls) -> Iterator[type[Backend]]:
        """The classes of all installed backends."""
        return map(backend, names())

    @classmethod
    def part(cls, name: str) -> Any:
        """The module `section`, `checks`, `lowering` or `runtime` of its package. The class is in
        `__init__` or `ops` there.
        """
        return import_module(f"{cls.__module__.removesuffix('.ops')}.{name}")

    @property
    def short_name(self) -> str:
        return self.TITLE

    @property
    def call_name(self) -> str:
        return self.FUNCTION

    @property
    def whole_call_modules(self) -> tuple[Modules, ...]:
        return self.members

    @property
    def split_axes(self) -> tuple[str, ...]:
        return (*self.shard, *self.replicate)

    @property
    def optimizer_dtype(self) -> str | None:
        """The dtype of separate weights that the optimizer steps; None for the model's own."""
        return None

    def drop_sizes(self) -> Self:
        return replace(self, nbytes=0, gathered=0)

    def units(self) -> Iterator[FullyShard]:
        """The units and the root as FSDP2 units, for code that reads both."""
        raise NotImplementedError


_BACKEND = Hook[type[Backend]]("ops", "BACKEND")
