"""Nested arguments as trees of tensors, and modes that see each operator."""

from planc.compat.names import private_names

with private_names("torch"):
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import (
        tree_flatten,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_unflatten,
        treespec_dumps,
        treespec_loads,
    )

__all__ = [
    "TorchDispatchMode",
    "_pytree",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]
