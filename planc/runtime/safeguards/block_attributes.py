"""Gives a recomputed block the attributes that a script sets on its wrapper.

A plan replaces a block that is recomputed by torch's wrapper. The wrapper returns the attributes of
its block, but stores new values itself. The forward of the block would not use them, and a state
dict would contain names that the wrapper cannot load.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from planc.compat.recompute import CheckpointWrapper


class _WritesToBlock(CheckpointWrapper):  # type: ignore[misc]
    """A wrapper that sets and deletes attributes on its block, except its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = self._checkpoint_wrapped_module
        if name == "training":  # the wrapper has one too
            setattr(wrapped, name, value)
        if self._has(name):
            super().__setattr__(name, value)
        else:
            setattr(wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if self._has(name):
            super().__delattr__(name)
        else:
            delattr(self._checkpoint_wrapped_module, name)

    def _has(self, name: str) -> bool:
        return name in self.__dict__ or name in self._modules or hasattr(type(self), name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._checkpoint_wrapped_module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._checkpoint_wrapped_module.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._checkpoint_wrapped_module.add_module(name, module)


def write_to_blocks(wrappers: Iterable[nn.Module]) -> None:
    """Lets checkpoint wrappers set attributes on their blocks, as they are set without a plan."""
    for wrapper in wrappers:
        if isinstance(wrapper, CheckpointWrapper) and not isinstance(wrapper, _WritesToBlock):
            wrapper.__class__ = _subclass(type(wrapper))


_SUBCLASSES: dict[type, type] = {}


def _subclass(kind: type) -> type:
    """The class of a wrapper, which FSDP may have replaced by a subclass, with its names."""
    if kind not in _SUBCLASSES:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _SUBCLASSES[kind] = type(kind.__name__, (_WritesToBlock, kind), names)
    return _SUBCLASSES[kind]
