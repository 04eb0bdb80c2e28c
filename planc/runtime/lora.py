"""LoRA by peft: the initial values of adapters that were on meta."""

from collections.abc import Iterable

from torch import nn

from planc.ops.lora import Adapt
from planc.runtime.standalone.lora_init import (
    initialize_adapters,
    initialize_magnitudes,
    unset_adapters,
)

NAME = "default"  # peft's name for the adapter
_OPS = "_planc_adapters"  # the model's attribute with the operations that added its adapters
_READ = "_planc_magnitudes"  # that with the names of the magnitudes of DoRA that a file gave


def remember(model: nn.Module, op: Adapt) -> None:
    """Stores the operation that added adapters on the model, for `init_adapters`."""
    setattr(model, _OPS, (*getattr(model, _OPS, ()), op))


# Initial values ----------------------------------------------------------------------------------


def init_adapters(model: nn.Module, unset: set[str]) -> None:
    """Initializes adapters that were on meta with the values that they would have had on the CPU.

    Args:
        model: a model whose adapters are allocated.
        unset: the plain names of adapter parameters without values.
    """
    for op in getattr(model, _OPS, ()):
        initialize_adapters(model, unset, op.pattern, rank=op.rank, init=op.initial, seed=op.seed)


def keep_magnitudes(model: nn.Module, read: Iterable[str]) -> None:
    """Notes the adapter parameters that a file gave, of which `renew_magnitudes` changes none."""
    setattr(model, _READ, {*getattr(model, _READ, ()), *read})


def renew_magnitudes(model: nn.Module, read: Iterable[str] = ()) -> None:
    """Sets the magnitudes of DoRA to the norms of the base weights that were loaded, as peft does
    when it adds adapters; a collective where weights are sharded.

    Args:
        model: a model whose weights have values.
        read: the names of what was loaded; magnitudes among it, or read before, are left.
    """
    keep_magnitudes(model, read)
    for op in (op for op in getattr(model, _OPS, ()) if op.dora):
        unset = unset_adapters(model, meta=False) - getattr(model, _READ)
        initialize_magnitudes(model, unset, op.pattern, init=op.initial, seed=op.seed)
