"""Arguments of `checkpoint_wrapper`: which results are saved, and offload to the CPU.

Emitted scripts inline these definitions without their types, so torch's names are
fully qualified.
"""

# mypy: allow-subclassing-any

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

Group = tuple[int | tuple[int, ...], tuple[str, ...], *tuple[tuple[int, ...], ...]]
"""(n, names): every n-th result of these operators, or those that n numbers; a third
item numbers those of them that are kept on the CPU.
"""

# Saving -------------------------------------------------------------------------------


def operators(names: Iterable[str]) -> Iterator[Any]:
    """Torch's operators with these names; a build may lack some of them."""
    for name in names:
        operator = torch.ops
        for part in name.split("."):
            operator = getattr(operator, part, None)
        if operator is not None:
            yield operator


def _there(groups: Iterable[Group]) -> None:
    """Raises if a group consists of one operator that torch does not have."""
    for _, names, *_ in groups:
        if len(names) == 1 and not list(operators(names)):
            raise ValueError(f"torch has no operator {names[0]}")


CPU = "cpu"
"""The decision for a call whose result is saved in host memory."""


def _chooser(groups: Iterable[Group]) -> Callable[..., bool | str | None]:
    """Decides for each call whether to save its result: every n-th, or those numbered;
    `CPU` for one that is kept there.

    The decision is None for an operator that is in no group. A call that draws random
    numbers is computed again, or what draws after it would draw its numbers.
    """
    table: dict[Any, tuple[int, int | tuple[int, ...], tuple[int, ...]]] = {}
    for group, (period, names, *more) in enumerate(groups):
        away = more[0] if more else ()
        table |= dict.fromkeys(operators(names), (group, period, away))
    counts: dict[tuple[bool, int], int] = {}

    def chosen(
        op: Any, args: Any, kwargs: Any, again: bool = False
    ) -> bool | str | None:
        if op not in table:
            return None
        group, period, away = table[op]
        count = counts.get((again, group), 0)
        counts[again, group] = count + 1
        keep = count % period == 0 if isinstance(period, int) else count in period
        if not keep or draws(op, args, kwargs):
            return False
        return CPU if count in away else True

    return chosen


def draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers: attention does so with a rate alone."""
    schema = getattr(op, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    if "dropout_p" in names:
        at = names.index("dropout_p")
        rate = args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)
        return bool(rate)
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


class _Held:
    """A saved result, and each tensor that shares its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.views: list[tuple[Tensor, int]] = []
        self.see(tensor)

    def see(self, view: Tensor) -> None:
        # as in torch: below autograd, `detach` starts a new version counter
        key = torch._C.DispatchKey.ADInplaceOrView
        with torch._C._SetExcludeDispatchKeyGuard(key, False):
            view = view.detach()
        self.views.append((view, view._version))

    def get_val(self, _allow: bool) -> Tensor:
        """The saved result, which torch calls for instead of recomputing."""
        if any(view._version != version for view, version in self.views):
            raise RuntimeError("a saved tensor was changed in place after it was saved")
        return self.tensor


class _Keep(torch.utils.checkpoint._CachingTorchDispatchMode):
    """Torch's caching mode, but correct if a result is changed in place later.

    Torch compares the version counter of the result only. A matrix product is changed
    through an `_unsafe_view`, which has another counter: gradients would be wrong.
    """

    def __init__(
        self, decide: Callable[..., Any], storage: dict[Any, Any], away: list[bool]
    ) -> None:
        super().__init__(decide, storage)
        self.held: dict[int, _Held] = {}
        self.away = away
        """Whether the result of the last call is kept on the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        ahead = super().__torch_dispatch__
        compiling = torch.utils.checkpoint._is_compiling
        if not hasattr(func, "_schema") or compiling(func, args, kwargs or {}):
            return ahead(func, types, args, kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._copy(value)
        out = ahead(func, types, args, kwargs)
        if self.held or func in self.storage:
            torch.utils._pytree.tree_map_only(torch.Tensor, self._see, out)
            self._hold(func)
        return out

    def _hold(self, func: Any) -> None:
        """Replaces the results that torch just saved by `_Held`, or by `_Parked`."""
        # torch 2.11: a list of what is saved; later: also what is not, by its number
        kept = self.storage.get(func, ())
        at = len(kept) - 1

        def hold_leaf(leaf: Any) -> Any:
            if not isinstance(leaf.val, torch.Tensor):
                return leaf
            if self.away[0]:
                return _park(leaf.val, func, True)
            held = self.held[_memory(leaf.val)] = _Held(leaf.val)
            return held

        if kept:
            wrapper = torch.utils.checkpoint._VersionWrapper
            kept[at] = torch.utils._pytree.tree_map_only(wrapper, hold_leaf, kept[at])

    def _see(self, tensor: Tensor) -> None:
        if _memory(tensor) in self.held:
            self.held[_memory(tensor)].see(tensor)

    def _copy(self, written: Any) -> None:
        """Copies a saved result that is about to be changed in place."""
        for tensor in torch.utils._pytree.tree_leaves(written):
            if isinstance(tensor, torch.Tensor):
                held = self.held.pop(_memory(tensor), None)
                if held is not None:
                    held.tensor, held.views = held.tensor.clone(), []


def _memory(tensor: Tensor) -> int:
    """A number that is equal for tensors that share memory."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    number: int = tensor.untyped_storage()._cdata
    return number


def saving(*groups: Group) -> Callable[[], tuple[Any, Any]]:
    """The `context_fn` that saves results of some operators; a group is (n, names)."""
    _there(groups)

    def contexts() -> tuple[Any, Any]:
        chosen, policy = _chooser(groups), torch.utils.checkpoint.CheckpointPolicy
        away = [False]

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            keep = chosen(op, args, kwargs, context.is_recompute)
            away[0] = keep == CPU
            return policy.MUST_SAVE if keep else policy.PREFER_RECOMPUTE

        _, reuse = torch.utils.checkpoint.create_selective_checkpoint_contexts(decide)
        return _Keep(decide, reuse.storage, away), reuse

    return contexts


# Offload ------------------------------------------------------------------------------


class _Parked:
    """A copy of a tensor on the CPU; of a DTensor, the copy of its shard."""

    def __init__(self, tensor: Tensor, pin: bool) -> None:
        self.spec: tuple[Any, Any] | None = None
        values = tensor
        if isinstance(tensor, DTensor):
            values = tensor.to_local()
            self.spec = (tensor.device_mesh, tensor.placements)
            self.sizes = {"shape": tensor.shape, "stride": tensor.stride()}
        self.device = values.device
        pin = pin and values.is_cuda
        self.held = torch.empty_like(values, device="cpu", pin_memory=pin)
        self.held.copy_(values, non_blocking=pin)

    def back(self) -> Tensor:
        """A copy on the original device, with the original placements."""
        values = torch.empty_like(self.held, device=self.device)
        values.copy_(self.held, non_blocking=self.held.is_pinned())
        if self.spec is None:
            return values
        sharded = DTensor.from_local
        return sharded(values, *self.spec, run_check=False, **self.sizes)

    def get_val(self, _allow: bool) -> Tensor:
        """The result, which torch calls for instead of recomputing."""
        return self.back()


def _park(tensor: Tensor, func: Any, pin: bool) -> _Parked:
    """A result of an operator on the CPU."""
    if func.namespace == "_c10d_functional":  # the collective may be unfinished
        tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return _Parked(tensor, pin)


def offloading(pin: bool, **options: Any) -> Callable[..., Any]:
    """The `checkpoint_fn` that keeps a module's inputs on the CPU until backward."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def call(*given: Any) -> Any:
            return function(*given, **kwargs)

        def pack(tensor: Tensor) -> _Parked:
            return _Parked(tensor, pin)

        with torch.autograd.graph.saved_tensors_hooks(pack, _Parked.back):
            checkpoint = torch.utils.checkpoint.checkpoint
            return checkpoint(call, *args, use_reentrant=False, **options)

    return run


# Both ---------------------------------------------------------------------------------


class _Park(torch.utils._python_dispatch.TorchDispatchMode):
    """Copies the chosen results of the forward pass to the CPU."""

    supports_higher_order_operators = True

    def __init__(
        self,
        chosen: Callable[..., bool | str | None],
        pin: bool,
        kept: dict[Any, list[Any]],
    ) -> None:
        super().__init__()
        self.chosen, self.pin, self.kept = chosen, pin, kept

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        keep = self.chosen(func, args, kwargs or {})
        if keep is not None:
            self.kept.setdefault(func, []).append(self._park(out, func, keep))
        return out

    def _park(self, out: Any, func: Any, keep: bool | str) -> Any:
        def one(tensor: Tensor) -> _Parked:
            return _park(tensor, func, self.pin)

        return (
            torch.utils._pytree.tree_map_only(torch.Tensor, one, out) if keep else None
        )


class _Fetch(torch.utils._python_dispatch.TorchDispatchMode):
    """Copies results back in recomputation, instead of calling their operators."""

    supports_higher_order_operators = True

    def __init__(self, kept: dict[Any, list[Any]]) -> None:
        super().__init__()
        self.kept = kept
        self.at: dict[Any, int] = {}

    def __enter__(self) -> Any:
        self.at = {}
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in self.kept:
            return func(*args, **(kwargs or {}))
        at = self.at[func] = self.at.get(func, -1) + 1
        park = self.kept[func][at]
        if park is None:
            return func(*args, **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(_Parked, _Parked.back, park)


def saving_on_cpu(pin: bool, *groups: Group) -> Callable[[], tuple[Any, Any]]:
    """Returns the same contexts as `saving`, with the results in host memory."""
    _there(groups)

    def contexts() -> tuple[Any, Any]:
        kept: dict[Any, list[Any]] = {}
        return _Park(_chooser(groups), pin, kept), _Fetch(kept)

    return contexts
