"""The collectives and messages of a rank as they are called, with the module that is running.

A collective is known by its operator, whose schema names the group, the tensors and the reduction.
What waits for a message, and which messages are one batch, are no operators: the Python functions
that start and wait are replaced. This module imports torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from planc.compat.collectives import distributed_c10d
from planc.compat.recompute import CheckpointWrapper
from planc.compat.trees import TorchDispatchMode, tree_leaves
from planc.ops.claims import ROOT
from planc.runtime.standalone.shards import WRAPPERS, plain_name

_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "recv_": "recv",
}
"""The kinds of operators that have other names."""
_WAITS = {"wait_tensor", "_wait_tensor"}
_INPUTS = ("input_tensor", "input", "input_tensors", "inputs", "tensors", "self", "tensor")
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_MESSAGES = ("send", "recv")


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model, by their names before a plan was applied."""
    return {
        plain_name(name, WRAPPERS): module  # `base_layer` is a module beside its adapter
        for name, module in model.named_modules()
        if not isinstance(module, CheckpointWrapper)
    }


class Collectives(TorchDispatchMode):  # type: ignore[misc]
    """Notes what a rank calls, with the module whose forward, recomputation or backward it is in.

    Args:
        names: of modules, by their `id`.
        stepping: says what runs after the backward pass, such as `clipping`; empty before.

    Attributes:
        calls: since the start, each with `kind`, `ranks`, `group`, `numel`, `dtype`, `reduces`,
            `uneven`, `module`, `during` and `unit` (of FSDP); a message with `peer`, `batch` (0
            alone) and `work`, a `wait` with the `work` that it waits for.
    """

    def __init__(self, names: dict[int, str], stepping: Callable[[], str]) -> None:
        super().__init__()
        self.names, self.stepping = names, stepping
        self.calls: list[dict[str, Any]] = []
        self.labels: list[str] = []
        self.running: list[str] = []
        self.since, self.inside = [0], [""]  # the module by the numbers of autograd's nodes
        self.batch = self.batches = self.works = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        match func.namespace:
            case "profiler" if name == "_record_function_enter_new":
                self.labels.append(args[0])
            case "profiler" if name == "_record_function_exit" and self.labels:
                self.labels.pop()
            case "c10d" | "_c10d_functional" if name not in _WAITS:
                given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
                with self.calling(self._record(_KINDS.get(name, name), {**given, **kwargs})):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    def calling(self, call: dict[str, Any] | None) -> AbstractContextManager[object]:
        """Surrounds a call, which is None where it is of no group."""
        if call is not None:
            self.calls.append(call)
        return nullcontext()

    def entering(self, name: str) -> AbstractContextManager[object]:
        """Surrounds the forward or the recomputation of a module."""
        return nullcontext()

    def _record(self, kind: str, given: dict[str, Any]) -> dict[str, Any] | None:
        named = (given.get(name) for name in ("process_group", "group_name", "group"))
        group = _group_of(next((tensor for tensor in named if tensor is not None), None))
        if group is None:  # such as of what wraps a tensor that is waited for later
            return None
        ranks = distributed.get_process_group_ranks(group)
        tensors = (leaf for name in _INPUTS for leaf in tree_leaves(given.get(name)))
        data = next((leaf for leaf in tensors if isinstance(leaf, Tensor)), None)
        call = {
            "kind": kind,
            "ranks": ranks,
            "group": group.group_name,
            "numel": 0 if data is None else data.numel(),
            "dtype": "" if data is None else str(data.dtype).removeprefix("torch."),
            "reduces": _reduction(given.get("reduce_op")),
            "uneven": any(given.get(n) for n in ("input_split_sizes", "output_split_sizes")),
            **self._where(),
        }
        if kind in _MESSAGES:
            call |= {"peer": ranks[given["dst" if kind == "send" else "src"]], "batch": self.batch}
        if kind == "broadcast":
            call["reduces"] = f"from rank {ranks[given.get('root_rank', given.get('src', 0))]}"
        return call

    def _where(self) -> dict[str, str]:
        """The module whose code or whose gradient runs, and the unit that FSDP works on."""
        label = next((name for name in reversed(self.labels) if name.startswith("FSDP::")), "")
        unit = plain_name(label.partition("(")[2].removesuffix(")"), WRAPPERS) or ROOT * bool(label)
        node = torch._C._current_autograd_node()
        step, module = self.stepping(), ""
        if not step and self.running:  # with a node, a checkpoint's second forward
            step, module = "forward" if node is None else "recomputation", self.running[-1]
        elif not step and node is not None:
            step = "backward"
            module = self.inside[bisect_right(self.since, node._sequence_nr()) - 1]
        elif not step and unit:  # what FSDP does when the backward pass has ended
            step = "backward"
        return {"module": module, "during": step, "unit": unit}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows which module runs."""
        with mock.patch.object(nn.Module, "__call__", self._wrap_call(nn.Module.__call__)):
            yield

    # what is no operator -------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Notes what runs inside."""
        group, batched = distributed.ProcessGroup, distributed.batch_isend_irecv

        def together(ops: Any) -> Any:
            self.batches += 1
            self.batch = self.batches
            try:
                return batched(ops)
            finally:
                self.batch = 0

        with (
            self.following(),
            mock.patch.object(group, "send", self._wrap_start(group.send)),
            mock.patch.object(group, "recv", self._wrap_start(group.recv)),
            mock.patch.object(distributed, "batch_isend_irecv", together),
            mock.patch.object(distributed_c10d, "batch_isend_irecv", together),
            self,
        ):
            yield

    def _wrap_call(self, plain: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.names.get(id(module))
            if name is None:
                return plain(module, *args, **kwargs)
            self.running.append(name)
            self._mark()
            try:
                with self.entering(name):
                    return plain(module, *args, **kwargs)
            finally:
                self.running.pop()
                self._mark()

        return call

    def _mark(self) -> None:
        """Autograd's nodes from here on belong to the module that runs now."""
        self.since.append(torch.autograd._get_sequence_nr())
        self.inside.append(self.running[-1] if self.running else "")

    def _wrap_start(self, plain: Any) -> Any:
        def start(group: Any, tensors: Any, peer: int, tag: int = 0, *rest: Any) -> _Work:
            work = plain(group, tensors, peer, tag, *rest)
            self.works += 1
            self.calls[-1]["work"] = self.works
            return _Work(work, tensors, self.calls, self.works)

        return start


class _Work:
    """The work of a message, which notes where it is waited for, and keeps its tensors."""

    def __init__(self, work: Any, tensors: Any, calls: list[dict[str, Any]], number: int) -> None:
        self.work, self.tensors, self.calls, self.number = work, tensors, calls, number

    def wait(self, *args: Any) -> Any:
        self.calls.append({"kind": "wait", "work": self.number})
        return self.work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _group_of(value: Any) -> Any:
    if isinstance(value, str):
        return distributed_c10d._resolve_process_group(value)
    return distributed.ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else value


def _reduction(value: Any) -> str:
    """The name of a reduction, which an operator has as a text, an object or a number."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.lower()
    operator = getattr(value, "op", value)
    operator = operator() if callable(operator) else operator
    return _REDUCTIONS[int(operator)] if int(operator) < len(_REDUCTIONS) else str(operator)
