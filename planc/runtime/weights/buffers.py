"""Buffers that no checkpoint holds, such as rotary frequencies, computed again after meta.

A model on the meta device has them without values, and no file brings any. Their module knows how
to compute them; what it computes is believed only if it does not depend on what was there before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from planc.runtime.sharded_tensors import plain

_METHODS = ("reset_buffers", "rope_init", "reset_parameters")
"""What libraries call the method of a module that fills its buffers."""


def recompute(model: nn.Module) -> tuple[dict[int, Tensor], tuple[str, ...]]:
    """Values for the buffers on meta that are not in a state dict.

    Args:
        model: not touched.

    Returns:
        The values on the CPU, by `id` of the buffer; and the names of tensors on meta that can't
        be computed, be they buffers or plain attributes.
    """
    values: dict[int, Tensor] = {}
    lost: list[str] = []
    for path, module in model.named_modules():
        names = [
            name
            for name in module._non_persistent_buffers_set
            if (buffer := module._buffers.get(name)) is not None and buffer.is_meta
        ]
        computed = _compute(model, path, module, sorted(names)) if names else {}
        for name in names:
            if name in computed:
                values[id(module._buffers[name])] = computed[name]
            else:
                lost.append(_called(path, name))
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                lost.append(_called(path, name))
    return values, tuple(sorted(lost))


def _compute(model: nn.Module, path: str, module: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """The buffers that one way or another computes the same whatever was there before."""
    found: dict[str, Tensor] = {}
    for way in _ways(model, path, module):
        with contextlib.suppress(Exception):  # a way that is not this module's
            one, other = (_filled(module, names, way, fill) for fill in (3, 5))
            for name in names:
                if name not in found and torch.equal(one[name], other[name]):
                    found[name] = one[name]
        if len(found) == len(names):
            break
    return found


def _ways(
    model: nn.Module, path: str, module: nn.Module
) -> Iterator[Callable[[nn.Module], nn.Module | None]]:
    """Calls that fill the buffers of a twin of a module, or give another with its buffers."""
    parts = path.split(".") if path else []
    for end in range(len(parts), -1, -1):  # the nearest model that knows how its parts begin
        owner = model.get_submodule(".".join(parts[:end]))
        if callable(init := getattr(owner, "_init_weights", None)):
            yield init
            break
    for name in _METHODS:
        if callable(getattr(module, name, None)):
            yield methodcaller(name)
    config = getattr(module, "config", None)
    if config is not None:
        yield lambda twin: type(twin)(config)


def _filled(
    module: nn.Module,
    names: list[str],
    way: Callable[[nn.Module], nn.Module | None],
    fill: int,
) -> dict[str, Tensor]:
    """The buffers after `way` ran on a twin of the module whose buffers held `fill`."""
    twin = _twin(module, fill)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        other = way(twin)
    made = other if isinstance(other, nn.Module) else twin
    out: dict[str, Tensor] = {}
    for name in names:
        buffer, was = made._buffers[name], module._buffers[name]
        assert buffer is not None and was is not None
        if buffer.is_meta or buffer.shape != was.shape:
            raise RuntimeError(f"{name} was not computed")
        out[name] = buffer.to(was.dtype)
    return out


def _twin(module: nn.Module, fill: int) -> nn.Module:
    """The same module with parameters on meta and buffers of its own on the CPU, no children."""
    kind = next(k for k in type(module).__mro__ if not _sharded(k))
    twin: Any = object.__new__(kind)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {
        name: None if p is None else nn.Parameter(_empty(p, "meta"), requires_grad=False)
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: None if b is None else _empty(b, "cpu").fill_(fill)
        for name, b in module._buffers.items()
    }
    twin._modules = {}
    made: nn.Module = twin
    return made


def _called(path: str, name: str) -> str:
    return plain(f"{path}.{name}" if path else name)


def _sharded(kind: type) -> bool:
    """Whether a class is one that `fully_shard` made of the module's own, or FSDP's half of it."""
    return issubclass(kind, FSDPModule)


def _empty(tensor: Tensor, device: str) -> Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
