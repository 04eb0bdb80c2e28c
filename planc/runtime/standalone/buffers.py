"""Buffers that no checkpoint has, such as rotary frequencies, of a model on meta.

On the meta device they have no values, and no file has them. Their module can compute
them; the result is used only if it does not depend on previous values.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from planc.runtime.standalone.shards import plain_name

BUFFER_METHODS = ("reset_buffers", "rope_init", "reset_parameters")
"""The names of methods that compute a module's buffers, in several libraries."""


def computed_buffers(model: nn.Module) -> tuple[dict[int, Tensor], list[str]]:
    """Values for the buffers on meta that are not in a state dict.

    Args:
        model: unchanged by this.

    Returns:
        The values on the CPU, by `id` of the buffer; and the names of tensors on meta
        that cannot be computed, buffers or plain attributes.
    """
    values: dict[int, Tensor] = {}
    lost: list[str] = []
    for path, module in model.named_modules():
        buffers = {
            n: module._buffers.get(n) for n in module._non_persistent_buffers_set
        }
        buffers = {n: b for n, b in buffers.items() if b is not None and b.is_meta}
        computed = buffers_of(model, path, module, sorted(buffers)) if buffers else {}
        values |= {id(buffers[name]): value for name, value in computed.items()}
        names = [name for name in buffers if name not in computed]
        plain = vars(module).items()
        names += [n for n, v in plain if isinstance(v, torch.Tensor) and v.is_meta]
        lost += [plain_name(f"{path}.{name}" if path else name) for name in names]
    return values, sorted(lost)


def buffers_of(
    model: nn.Module, path: str, module: nn.Module, names: list[str]
) -> dict[str, Tensor]:
    """The buffers for which a call gives the same values, whatever they were before."""
    buffers: dict[str, Tensor] = {}
    for way in ways_to_fill(model, path, module):
        with contextlib.suppress(Exception):  # the call may not fit this module
            first, other = (filled_twin(module, names, way, value) for value in (3, 5))
            for name in names:
                if name not in buffers and torch.equal(first[name], other[name]):
                    buffers[name] = first[name]
        if len(buffers) == len(names):
            break
    return buffers


def ways_to_fill(
    model: nn.Module, path: str, module: nn.Module
) -> Iterator[Callable[..., Any]]:
    """Calls that fill the buffers of a module's twin, or return another module."""
    steps = path.split(".") if path else []
    for end in range(
        len(steps), -1, -1
    ):  # the nearest model that can initialize its parts
        owner = model.get_submodule(".".join(steps[:end]))
        if callable(init := getattr(owner, "_init_weights", None)):
            yield init
            break
    for name in BUFFER_METHODS:
        if callable(method := getattr(type(module), name, None)):
            yield method
    config = getattr(module, "config", None)
    if config is not None:
        yield lambda twin: type(twin)(config)


def filled_twin(
    module: nn.Module, names: list[str], way: Callable[..., Any], value: int
) -> dict[str, Tensor]:
    """The buffers after `way` ran on a twin of the module with buffers of `value`."""
    twin = twin_of(module, value)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        other = way(twin)
    filled = other if isinstance(other, nn.Module) else twin
    out: dict[str, Tensor] = {}
    for name in names:
        buffer, was = filled._buffers[name], module._buffers[name]
        if buffer.is_meta or buffer.shape != was.shape:
            raise RuntimeError(f"{name} was not computed")
        out[name] = buffer.to(was.dtype)
    return out


def twin_of(module: nn.Module, value: int) -> nn.Module:
    """A copy of a module: parameters on meta, new buffers on the CPU, no children."""
    # the original class, not the subclass that `fully_shard` created, nor FSDPModule
    kind = next(k for k in type(module).__mro__ if not issubclass(k, FSDPModule))
    twin: Any = object.__new__(kind)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {
        name: None
        if p is None
        else nn.Parameter(new_like(p, "meta"), requires_grad=False)
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: None if b is None else new_like(b, "cpu").fill_(value)
        for name, b in module._buffers.items()
    }
    twin._modules = {}
    module_twin: nn.Module = twin
    return module_twin


def new_like(tensor: Tensor, device: str) -> Tensor:
    """A plain tensor of the same shape and dtype."""
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
