"""What `checkpoint_wrapper` is given beside a module: saving by op, and offload to the CPU.

It needs torch alone. The emitted Python holds what it uses of this text as it stands here, and so
does the same as `apply`: hence no imports from planc, torch's names in full, and short lines.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint

# Saving ------------------------------------------------------------------------------------------


def operators(names: Any) -> Any:
    """Torch's operators of these names; a build may lack some of them."""
    for name in names:
        found: Any = torch.ops
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            yield found


def _chooser(groups: Any) -> Any:
    """Tells call by call what to keep: of each group (n, names) every n-th result.

    It gives None for an operator that is in no group.
    """
    table: dict[Any, Any] = {}
    for group, (every, names) in enumerate(groups):
        table |= dict.fromkeys(operators(names), (group, every))
    counts: dict[Any, int] = {}

    def chosen(op: Any, again: bool = False) -> Any:
        if op not in table:
            return None
        group, every = table[op]
        count = counts.get((again, group), 0)
        counts[again, group] = count + 1
        return count % every == 0

    return chosen


def saving(*groups: Any) -> Any:
    """The `context_fn` that keeps what some operators give; a group is (n, names)."""

    def contexts() -> Any:
        chosen, policy = _chooser(groups), torch.utils.checkpoint.CheckpointPolicy

        def decide(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> Any:
            keep = chosen(op, context.is_recompute)
            return policy.MUST_SAVE if keep else policy.PREFER_RECOMPUTE

        return torch.utils.checkpoint.create_selective_checkpoint_contexts(decide)

    return contexts


# Offload -----------------------------------------------------------------------------------------


class _Parked:
    """A copy of a tensor on the CPU, of a DTensor's own part there."""

    def __init__(self, tensor: Any, pin: bool) -> None:
        self.spec: Any = None
        values = tensor
        if isinstance(tensor, torch.distributed.tensor.DTensor):
            values = tensor.to_local()
            self.spec = (tensor.device_mesh, tensor.placements)
            self.sizes = {"shape": tensor.shape, "stride": tensor.stride()}
        self.device = values.device
        pin = pin and values.is_cuda
        self.held = torch.empty_like(values, device="cpu", pin_memory=pin)
        self.held.copy_(values, non_blocking=pin)

    def back(self) -> Any:
        """The tensor again, where it was."""
        values = torch.empty_like(self.held, device=self.device)
        values.copy_(self.held, non_blocking=self.held.is_pinned())
        if self.spec is None:
            return values
        sharded = torch.distributed.tensor.DTensor.from_local
        return sharded(values, *self.spec, run_check=False, **self.sizes)


def offloading(pin: bool, **options: Any) -> Any:
    """The `checkpoint_fn` that keeps a module's inputs on the CPU until backward."""

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        def called(*given: Any) -> Any:
            return function(*given, **kwargs)

        def pack(tensor: Any) -> Any:
            return _Parked(tensor, pin)

        with torch.autograd.graph.saved_tensors_hooks(pack, _Parked.back):
            checkpoint = torch.utils.checkpoint.checkpoint
            return checkpoint(called, *args, use_reentrant=False, **options)

    return run


# Both --------------------------------------------------------------------------------------------


class _Keep(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """In forward: parks what was chosen."""

    supports_higher_order_operators = True

    def __init__(self, chosen: Any, pin: bool, kept: Any) -> None:
        super().__init__()
        self.chosen, self.pin, self.kept = chosen, pin, kept

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        keep = self.chosen(func)
        if keep is not None:
            self.kept.setdefault(func, []).append(self._park(out) if keep else None)
        return out

    def _park(self, out: Any) -> Any:
        over = torch.utils._pytree.tree_map_only
        return over(torch.Tensor, lambda t: _Parked(t, self.pin), out)


class _Reuse(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """In backward: brings it back in place of computing it again."""

    supports_higher_order_operators = True

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept
        self.at: dict[Any, int] = {}

    def __enter__(self) -> Any:
        self.at = {}
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.kept:
            return func(*args, **(kwargs or {}))
        at = self.at[func] = self.at.get(func, -1) + 1
        park = self.kept[func][at]
        if park is None:
            return func(*args, **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(_Parked, _Parked.back, park)


def saving_on_cpu(pin: bool, *groups: Any) -> Any:
    """The same as `saving`, with what is kept on the CPU."""

    def contexts() -> Any:
        kept: dict[Any, Any] = {}
        return _Keep(_chooser(groups), pin, kept), _Reuse(kept)

    return contexts
