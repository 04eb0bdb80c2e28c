"""What `checkpoint_wrapper` is given beside a module: saving by op, and offload to the CPU.

It needs torch alone. The emitted Python holds what it uses of this text as it stands here, and so
does the same as `apply`: hence no imports from planc, torch's names in full, and short lines.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-subclassing-any
# mypy: disable-error-code="var-annotated"

from __future__ import annotations

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor

# Saving ------------------------------------------------------------------------------------------


def operators(names):
    """Torch's operators of these names; a build may lack some of them."""
    for name in names:
        found = torch.ops
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            yield found


def _chooser(groups):
    """Tells call by call what to keep: of each group (n, names) every n-th result.

    It gives None for an operator that is in no group.
    """
    table = {}
    for group, (every, names) in enumerate(groups):
        table |= dict.fromkeys(operators(names), (group, every))
    counts = {}

    def chosen(op, again=False):
        if op not in table:
            return None
        group, every = table[op]
        count = counts.get((again, group), 0)
        counts[again, group] = count + 1
        return count % every == 0

    return chosen


class _Held:
    """A result that is kept, and each tensor that looks at the same memory."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.views = []
        self.see(tensor)

    def see(self, view):
        # as torch does it: below autograd, a plain detach has a version of its own
        view = torch.utils.checkpoint._detach_helper(view)
        self.views.append((view, view._version))

    def get_val(self, _allow):
        """What torch takes in place of computing it again."""
        if any(view._version != version for view, version in self.views):
            raise RuntimeError("what a checkpoint keeps was changed in place since")
        return self.tensor


class _Keep(torch.utils.checkpoint._CachingTorchDispatchMode):
    """Torch's own, but right where a result is changed in place later.

    Torch looks at the version of the result alone, and a matrix product is changed
    through an `_unsafe_view` of it, which has another: the gradients would be wrong.
    """

    def __init__(self, decide, storage):
        super().__init__(decide, storage)
        self.held = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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

    def _hold(self, func):
        """Takes over what torch just kept."""
        kept = self.storage.get(func, {})
        at = self.func_counter[func] - 1

        def own(leaf):
            if not isinstance(leaf.val, torch.Tensor):
                return leaf
            held = self.held[_memory(leaf.val)] = _Held(leaf.val)
            return held

        if at in kept:
            wrapper = torch.utils.checkpoint._VersionWrapper
            kept[at] = torch.utils._pytree.tree_map_only(wrapper, own, kept[at])

    def _see(self, tensor):
        if _memory(tensor) in self.held:
            self.held[_memory(tensor)].see(tensor)

    def _copy(self, written):
        """A result that is about to be changed is kept as a copy from now on."""
        for tensor in torch.utils._pytree.tree_leaves(written):
            if isinstance(tensor, torch.Tensor):
                held = self.held.pop(_memory(tensor), None)
                if held is not None:
                    held.tensor, held.views = held.tensor.clone(), []


def _memory(tensor):
    """What two tensors share where one is a view of the other."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.untyped_storage()._cdata


def saving(*groups):
    """The `context_fn` that keeps what some operators give; a group is (n, names)."""

    def contexts():
        chosen, policy = _chooser(groups), torch.utils.checkpoint.CheckpointPolicy

        def decide(context, op, *_args, **_kwargs):
            keep = chosen(op, context.is_recompute)
            return policy.MUST_SAVE if keep else policy.PREFER_RECOMPUTE

        _, reuse = torch.utils.checkpoint.create_selective_checkpoint_contexts(decide)
        return _Keep(decide, reuse.storage), reuse

    return contexts


# Offload -----------------------------------------------------------------------------------------


class _Parked:
    """A copy of a tensor on the CPU, of a DTensor's own part there."""

    def __init__(self, tensor, pin):
        self.spec = None
        values = tensor
        if isinstance(tensor, DTensor):
            values = tensor.to_local()
            self.spec = (tensor.device_mesh, tensor.placements)
            self.sizes = {"shape": tensor.shape, "stride": tensor.stride()}
        self.device = values.device
        pin = pin and values.is_cuda
        self.held = torch.empty_like(values, device="cpu", pin_memory=pin)
        self.held.copy_(values, non_blocking=pin)

    def back(self):
        """The tensor again, where it was."""
        values = torch.empty_like(self.held, device=self.device)
        values.copy_(self.held, non_blocking=self.held.is_pinned())
        if self.spec is None:
            return values
        sharded = DTensor.from_local
        return sharded(values, *self.spec, run_check=False, **self.sizes)


def offloading(pin, **options):
    """The `checkpoint_fn` that keeps a module's inputs on the CPU until backward."""

    def run(function, *args, **kwargs):
        def called(*given):
            return function(*given, **kwargs)

        def pack(tensor):
            return _Parked(tensor, pin)

        with torch.autograd.graph.saved_tensors_hooks(pack, _Parked.back):
            checkpoint = torch.utils.checkpoint.checkpoint
            return checkpoint(called, *args, use_reentrant=False, **options)

    return run


# Both --------------------------------------------------------------------------------------------


class _Park(torch.utils._python_dispatch.TorchDispatchMode):
    """In forward: parks what was chosen."""

    supports_higher_order_operators = True

    def __init__(self, chosen, pin, kept):
        super().__init__()
        self.chosen, self.pin, self.kept = chosen, pin, kept

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        keep = self.chosen(func)
        if keep is not None:
            park = self._park(out, func.namespace) if keep else None
            self.kept.setdefault(func, []).append(park)
        return out

    def _park(self, out, namespace):
        def one(tensor):
            if namespace == "_c10d_functional":  # its values are on their way
                tensor = torch.ops._c10d_functional.wait_tensor(tensor)
            return _Parked(tensor, self.pin)

        return torch.utils._pytree.tree_map_only(torch.Tensor, one, out)


class _Fetch(torch.utils._python_dispatch.TorchDispatchMode):
    """In backward: brings it back in place of computing it again."""

    supports_higher_order_operators = True

    def __init__(self, kept):
        super().__init__()
        self.kept = kept
        self.at = {}

    def __enter__(self):
        self.at = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        if func not in self.kept:
            return func(*args, **(kwargs or {}))
        at = self.at[func] = self.at.get(func, -1) + 1
        park = self.kept[func][at]
        if park is None:
            return func(*args, **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(_Parked, _Parked.back, park)


def saving_on_cpu(pin, *groups):
    """The same as `saving`, with what is kept on the CPU."""

    def contexts():
        kept = {}
        return _Park(_chooser(groups), pin, kept), _Fetch(kept)

    return contexts
