"""The operators that each checkpointed module calls in one forward pass, with the memory that each
makes and the work that it is: what the budgets of the checkpoint section choose among.

A dispatch mode notes them where torch's selective checkpointing sees them, so that the n-th call of
an operator is the same in both. It works on fake tensors, and imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from planc.compat.collectives import AsyncCollectiveTensor
from planc.compat.fsdp import FSDPState
from planc.compat.recompute import CheckpointWrapper
from planc.compat.trees import TorchDispatchMode, tree_leaves, tree_map_only
from planc.ops.activation_checkpoint import GROUPS
from planc.runtime.standalone.activation_checkpoint import draws

_ATTENTION = "attention"


class ForwardDone(BaseException):
    """Raised to end a step after its forward passes."""


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return flops


def _grouped_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    rows = left.shape[0] if left.dim() == 2 else left.shape[0] * left.shape[1]
    return int(2 * rows * left.shape[-1] * right.shape[-1])


_OWN_FLOPS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten._grouped_mm": _grouped_flops,
}
"""Operators whose work torch's `flop_registry` lacks: it would count as nothing."""


def _local(tensor: Tensor) -> Tensor:
    """The local tensor of this rank."""
    while isinstance(tensor, DTensor | AsyncCollectiveTensor):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
    return tensor


def _memory(tensor: Tensor) -> int:
    number: int = _local(tensor).untyped_storage()._cdata
    return number


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in map(_local, tensors))


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = getattr(func, "overloadpacket", func)
    given, named, result = (tree_map_only(Tensor, _local, x) for x in (args, kwargs, out))
    if rule := _OWN_FLOPS.get(str(packet)):
        return int(rule(*given, **named))
    known = flop_registry.get(packet)
    return int(known(*given, **named, out_val=result)) if known else 0


def _operator_name(func: Any) -> str:
    """The name of an operator in a save list: all kernels of attention have one name, because
    another device takes another kernel.
    """
    name = str(func) if hasattr(func, "_schema") else f"higher_order.{func}"
    return _ATTENTION if name in GROUPS[_ATTENTION] else name


class CallRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes the calls of one module's forward pass.

    Attributes:
        calls: in order, each with `op`, `nth` (of this operator), `size` (bytes of new memory),
            `flops`, `moved` (bytes read and written), `sent` (bytes of a collective's result) and
            `fixed` (whether its result cannot be kept).
    """

    supports_higher_order_operators = True

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.made: dict[int, int] = {}
        self.inputs = {_memory(t) for t in inputs}
        self.apart: set[str] = set()
        """The operators that FSDP calls inside, which a recomputation does not repeat."""
        self.hooks = 0
        self.saved: dict[int, Tensor] = {}
        self.stop = 0
        """The number of calls before autograd has saved all: a recomputation stops there."""
        self.alive: list[Any] = []
        """The arguments and results of calls, held so that no later storage has an earlier one's
        address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        self.alive.append((args, kwargs, out))
        if self.hooks:
            self.counts[_operator_name(func)] += 1
            self.apart.add(_operator_name(func))
            return out
        taken, given = _tensors((args, kwargs)), _tensors(out)
        known = {_memory(t) for t in taken}
        fresh = {_memory(t): _local(t).untyped_storage().nbytes() for t in given}
        fresh = {memory: size for memory, size in fresh.items() if memory not in known}
        written = self._written_memory(func, args, kwargs)
        self._note(func, (args, kwargs, out), sum(fresh.values()), bool(written))
        for memory in written & self.made.keys():
            self.calls[self.made[memory]]["fixed"] = True
        self.made |= dict.fromkeys(fresh, len(self.calls) - 1)
        return out

    def _note(self, func: Any, around: tuple[Any, Any, Any], size: int, writes: bool) -> None:
        args, kwargs, out = around
        name, tensors = _operator_name(func), [*_tensors((args, kwargs)), *_tensors(out)]
        works = size or writes
        sends = getattr(func, "namespace", "") in ("_c10d_functional", "c10d")
        self.calls.append(
            {
                "op": name,
                "nth": self.counts[name],
                "size": size,
                "flops": _flops(func, args, kwargs, out) if works else 0,
                "moved": _bytes(tensors) if works and not sends else 0,
                "sent": _bytes(_tensors(out) or tensors) if sends else 0,
                "fixed": writes or not size or draws(func, args, kwargs),
            }
        )
        self.counts[name] += 1

    def _written_memory(self, func: Any, args: Any, kwargs: Any) -> set[int]:
        """The memory that a call writes into."""
        if not hasattr(func, "_schema"):
            return set()
        addresses: set[int] = set()
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[at] if at < len(args) else kwargs.get(argument.name)
                addresses |= {_memory(t) for t in _tensors(value)}
        return addresses

    def keep(self, tensor: Tensor) -> Tensor:
        """Takes note of a tensor that autograd saves."""
        self.saved.setdefault(_memory(tensor), tensor)
        self.stop = len(self.calls)
        return tensor

    def document(self, inputs: int, out: Any) -> dict[str, Any]:
        """The notes on a module with inputs of so many bytes, as plain data."""
        given = {_memory(t) for t in _tensors(out)}
        wanted = {m: self.made[m] for m in self.saved if m in self.made}
        inside = {m: _local(self.saved[m]).untyped_storage().nbytes() for m in wanted}
        inside = {m: size for m, size in inside.items() if m not in given}
        last = {self.made[m] for m in given if m in self.made}
        for at, call in enumerate(self.calls):
            call["fixed"] |= at in last or call["op"] in self.apart
        return {
            "calls": [[*call.values()] for call in self.calls],
            "stop": self.stop,
            "inputs": inputs,
            "saved": sum(inside.values()) + inputs * bool(self.inputs & self.saved.keys()),
        }


class BlockCalls:
    """Notes the calls of checkpointed modules in a step, which it ends before backward.

    Args:
        names: the names of modules, by their `id`.
        asked: the names of those that are noted, each with the one like it that runs in its place,
            whose results then are its own.
    """

    def __init__(self, names: dict[int, str], asked: dict[str, str]) -> None:
        self.names, self.asked = names, asked
        self.given: dict[str, Any] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.twice: set[str] = set()
        self.running: CallRecorder | None = None
        self.seen: dict[int, Tensor] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what runs inside, in place of checkpointing it."""
        forward, hooks = CheckpointWrapper.forward, ("_pre_forward", "_post_forward")

        def record_or_call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            name = self.names.get(id(wrapper._checkpoint_wrapped_module), "")
            if name not in self.asked:
                return forward(wrapper, *args, **kwargs)
            return self._note_block(name, wrapper._checkpoint_wrapped_module, args, kwargs)

        with ExitStack() as stack, _until_backward():
            stack.enter_context(mock.patch.object(CheckpointWrapper, "forward", record_or_call))
            for name in hooks:
                plain = getattr(FSDPState, name)
                stack.enter_context(mock.patch.object(FSDPState, name, self._inside_hook(plain)))
            yield

    def _inside_hook(self, plain: Any) -> Any:
        def hook(*args: Any, **kwargs: Any) -> Any:
            recorder = self.running
            if recorder is None:
                return plain(*args, **kwargs)
            recorder.hooks += 1
            try:
                return plain(*args, **kwargs)
            finally:
                recorder.hooks -= 1

        return hook

    def _note_block(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if name in self.found:
            self.twice.add(name)
        if (like := self.asked[name]) in self.given and name not in self.found:
            self.found[name] = self.found[like]
            return self.given[like]
        tensors = _tensors((args, kwargs))
        inputs = [t for t in tensors if t.requires_grad] or tensors[:1]
        sizes = {_memory(t): _local(t).untyped_storage().nbytes() for t in inputs}
        size = sum(n for memory, n in sizes.items() if memory not in self.seen)
        self.seen |= {_memory(t): t for t in inputs}
        recorder = self.running = CallRecorder(inputs)
        with torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda t: t), recorder:
            out = module(*args, **kwargs)
        self.running = None
        self.found[name], self.given[name] = recorder.document(size, out), out
        return out

    def answer(self) -> dict[str, Any]:
        """The tables, and which one each module has; `error` where one has none."""
        missing = sorted(self.asked - self.found.keys())
        if self.twice:
            return {"error": f"`{min(self.twice)}` runs twice in a forward pass"}
        if missing:
            return {"error": f"`{missing[0]}` does not run on tokens alone"}
        tables: list[dict[str, Any]] = []
        of = {}
        for name, table in self.found.items():
            if table not in tables:
                tables.append(table)
            of[name] = tables.index(table)
        return {"tables": tables, "of": of}


@contextmanager
def _until_backward() -> Iterator[None]:
    def ends(*_: Any, **__: Any) -> None:
        raise ForwardDone

    with mock.patch.object(torch.autograd, "backward", ends), suppress(ForwardDone):
        yield
