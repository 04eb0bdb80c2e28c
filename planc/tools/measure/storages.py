"""The storages that a rank holds, counted as operators make them and as they are freed.

It works on fake tensors, whose storages have a size and no memory, and imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from planc.compat.dtensor import ShardingPropagator
from planc.compat.fakes import FakeTensor
from planc.compat.trees import TorchDispatchMode, tree_leaves
from planc.proxy.fakes import on_fakes
from planc.runtime.standalone import kept_states
from planc.tools.measure.ledger import Ledger


@contextmanager
def on_one_device(away: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Optimizer states go to the host's memory by a function, and come back as copies: host and
    device are one.
    """

    def back(values: Tensor, _: Tensor) -> Tensor:
        return values.clone()

    with (
        mock.patch.object(kept_states, "to_host", away),
        mock.patch.object(kept_states, "to_device", back),
    ):
        yield


class Storages(TorchDispatchMode, Ledger):  # type: ignore[misc]
    """Notes every storage that an operator makes, and when it is freed.

    Args:
        what: says what a storage is that is made now.
    """

    def __init__(self, what: Callable[[], str]) -> None:
        TorchDispatchMode.__init__(self)
        Ledger.__init__(self)
        self.what = what
        self.known: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self.aside = 0
        self.hosted: set[int] = set()

    def record_part(self) -> None:
        """Another module runs: nothing to do, as each storage asks what it is."""

    def note(self, tensors: Iterable[Tensor], name: str = "") -> None:
        """Counts the storages of tensors; those that are known get the name that is given."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            self._note(storage, name)

    def _note(self, storage: Any, name: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.hosted:
            return
        if key not in self.known:

            def gone(_: Any) -> None:
                _, size, number = self.known.pop(key)
                self.events.append((number, -size))

            number = self.add_block(name or self.what())
            self.known[key] = (weakref.ref(storage, gone), 0, number)
        reference, before, number = self.known[key]
        if name:
            self.names[number] = name
        if size != before:
            self.known[key] = (reference, size, number)
            self.events.append((number, size - before))

    def with_host(self) -> AbstractContextManager[None]:
        """Leaves the host's memory out, where all fake tensors are on one device; what is copied
        to the device is counted.
        """

        def away(values: Tensor) -> Tensor:
            self.aside += 1
            copy = values.clone()
            self.aside -= 1
            self.hosted.add(copy.untyped_storage()._cdata)
            return copy

        return on_one_device(away)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what runs inside.

        FSDP gathers parameters into storages that it resizes by `UntypedStorage.resize_`, which is
        no operator. DTensor asks for
        the shapes of results by running operators on tensors of whole shapes, which a rank never
        holds.
        """
        resize, shapes = (
            torch.UntypedStorage.resize_,
            ShardingPropagator._propagate_tensor_meta_non_cached,
        )

        def resize_and_note(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.known:
                self._note(storage, "gathered parameters")
            return result

        def infer_shapes(*args: Any, **kwargs: Any) -> Any:
            self.aside += 1
            try:
                return shapes(*args, **kwargs)
            finally:
                self.aside -= 1

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize_and_note),
            mock.patch.object(
                ShardingPropagator, "_propagate_tensor_meta_non_cached", infer_shapes
            ),
            self,
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        waits = torch.ops._c10d_functional.wait_tensor.default
        if func is waits and isinstance(args[0], FakeTensor):
            return args[0]  # on fake tensors it makes a copy
        out = on_fakes(func, args, kwargs or {})
        if not self.aside:
            if func.overloadpacket._qualified_op_name.endswith("resize_"):
                self.note([args[0]])
            self.note(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out
