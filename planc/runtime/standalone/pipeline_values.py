"""Arguments of blocks that a stage sends beside hidden states.

What modules before the blocks compute of tokens, such as a per-layer input or an
encoder's states, goes to the stages of the blocks that take it. What blocks compute,
such as keys and values that layers share, goes from each stage to the next one. On the
stages between, the model's own code makes these arguments of placeholders; blocks get
what was received in their place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


class SentValues:
    """The arguments of one rank.

    Args:
        given: names (positions, if passed without names) of arguments that the first
            stage computes; each block has its own.
        states: those that blocks compute; what the first block of a stage takes.
        bounds: the first block of each stage.
    """

    def __init__(
        self, given: Sequence[str], states: Sequence[str], bounds: Sequence[int]
    ) -> None:
        self.given, self.states, self.bounds = given, states, bounds
        self.received = self.sent = self.nothing()

    def nothing(self) -> dict[str, Any]:
        """No value: by name, for blocks by their numbers, and for the next stage."""
        return {"given": {name: {} for name in self.given}, "states": {}}

    def keep(self, stage: int, number: int, args: Any, kwargs: Any) -> None:
        """Takes what is sent from the arguments of a block of a later stage."""
        for name in self.given:
            local = argument(name, args, kwargs)
            given = self.received["given"][name][number] if stage else local
            self.sent["given"][name][number] = given
        for name in self.states if number == self.bounds[stage + 1] else ():
            value = argument(name, args, kwargs)
            self.sent["states"][name] = dict(value) if hasattr(value, "keys") else value

    def call(
        self, block: nn.Module, stage: int, number: int, *args: Any, **kwargs: Any
    ) -> Any:
        """A block of this stage, with the arguments that were received."""
        if not stage:
            return block(*args, **kwargs)
        values = {n: given[number] for n, given in self.received["given"].items()}
        if number == self.bounds[stage]:
            for name, value in self.received["states"].items():
                old = argument(name, args, kwargs)
                values[name] = value if old is args[0] else into(old, value)
        arguments = [*args]
        for name, value in values.items():
            if name.isdecimal():
                arguments[int(name)] = value
            else:
                kwargs[name] = value
        return block(*arguments, **kwargs)


def argument(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An argument by its name, or by its position."""
    return args[int(name)] if name.isdecimal() else kwargs.get(name)


def into(old: Any, value: Any) -> Any:
    """A value in the place of the model's own, which later blocks see too if the
    model's code keeps it: a table, a list, or a tensor that it goes on with.
    """
    if hasattr(old, "keys"):
        old.update(value)
        return old
    if isinstance(old, list):
        old[:] = value
        return old
    if isinstance(old, Tensor) and not (old.is_leaf and old.requires_grad):
        return old.copy_(value)
    return value
