"""LoRA by peft: what it requires, and the initial values of adapters that were on meta."""

from collections.abc import Iterable

from torch import nn

from planc.diagnostic import PlanError
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.quantization import Quantize
from planc.runtime.preconditions import problem, stop
from planc.runtime.standalone.lora_init import (
    initialize_adapters,
    initialize_magnitudes,
    unset_adapters,
)

NAME = "default"  # peft's name for the adapter
_OPS = "_planc_adapters"  # the model's attribute with the operations that added its adapters
_READ = "_planc_magnitudes"  # that with the names of the magnitudes of DoRA that a file gave


def missing_peft(lowered: Lowered) -> str | None:
    """Why a plan's adapters cannot be created here; None if they can, or if it has none."""
    if not lowered.has(Adapt):
        return None
    try:
        import peft  # noqa: F401
    except ImportError as error:
        return f"the plan has adapters, and peft cannot be imported: {error}"
    return None


def require_packages(lowered: Lowered) -> None:
    """Checks that the packages that a plan's adapters need can be imported.

    Raises:
        PlanError: PL187, peft cannot be imported; PL685, bitsandbytes cannot be imported.
    """
    if missing := missing_peft(lowered):
        raise PlanError([problem("PL187", missing, help="pip install 'planc[lora]'")])
    if lowered.has(Quantize):
        try:
            import bitsandbytes  # noqa: F401
        except Exception as error:  # loading its shared libraries can raise any exception
            text = f"the plan has 4-bit weights, and bitsandbytes cannot be imported: {error}"
            raise stop("PL685", text, help="pip install 'planc[qlora]'") from error


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
