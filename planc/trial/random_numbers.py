"""Random numbers of ranks that are threads of one process.

torch has one default generator for each device, and threads share it. Each rank gets one of its
own.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RankGenerators:
    """The default generator of each rank: what `torch.manual_seed` and its like reach."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def mine(self) -> torch.Generator:
        if not hasattr(self._of_thread, "generator"):
            self._of_thread.generator = torch.Generator()
        generator: torch.Generator = self._of_thread.generator
        return generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mine, name)


class RankRandom(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Makes the operations of a thread draw from its rank's own generator.

    torch has one default generator, which threads share. A model's calls of `torch.manual_seed`
    reach the rank's generator without this mode; operations that draw need it.
    """

    _one_at_a_time = threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        mine, shared = torch.random.default_generator.mine, torch._C.default_generator
        with self._one_at_a_time:
            before = shared.get_state()
            shared.set_state(mine.get_state())
            try:
                return func(*args, **(kwargs or {}))
            finally:
                mine.set_state(shared.get_state())
                shared.set_state(before)


class Draws(TorchDispatchMode):  # type: ignore[misc]
    """Notes whether any operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
