"""`checkpoint_wrapper`: activations recomputed in backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from planc.model.facts import Modules
from planc.ops.aten_operators import Save
from planc.ops.base import OMIT, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Op):
    """`checkpoint_wrapper` (without reentry) around each module.

    Args:
        save: what is kept in forward (selective checkpointing); empty where nothing is.
        offload: what is kept, and what goes into the modules, waits for backward on the CPU.
        pin: there in pinned memory, where the device is CUDA.
        preserve_rng: `preserve_rng_state`.
        early_stop: `early_stop`.
    """

    modules: Modules
    save: tuple[Save, ...] = field(default=(), metadata=OMIT)
    offload: bool = field(default=False, metadata=OMIT)
    pin: bool = field(default=True, metadata=OMIT)
    preserve_rng: bool = field(default=True, metadata=OMIT)
    early_stop: bool = field(default=True, metadata=OMIT)
