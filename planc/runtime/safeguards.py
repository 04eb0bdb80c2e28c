"""What `planc.apply` asks for besides a plan: verdicts, equal weights and inputs.

The exchange of the ranks that compares lowered plans says it, so that all go on or stop together.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import nn

from planc.ops.lowered import Lowered
from planc.runtime.known_verdict import KnownVerdict, Required
from planc.runtime.meshes import Meshes
from planc.runtime.same_inputs import FirstPasses, data_ranks, tensor_ranks
from planc.runtime.same_kinds import kinds_hook

_log = logging.getLogger("planc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Safeguards:
    """Nothing by default.

    Args:
        known: what proofs say of the plan, as far as this rank knows; None to ask for nothing.
        require: what they must say; None for a plan that is not known to be refuted.
        compare: the number of first forward passes in which ranks compare their inputs, those of
            the tensor axes and those of the innermost data axis; 0 compares neither these nor the
            weights that the ranks have built, nor in all passes which kinds of inputs data ranks
            pass.
    """

    known: KnownVerdict | None = None
    require: Required | None = None
    compare: int = 0


def first_passes(model: nn.Module, lowered: Lowered, meshes: Meshes, passes: int) -> FirstPasses:
    """What is compared when the model runs first, besides weights; `passes` is `compare`."""
    if not passes:
        return FirstPasses()
    alike, apart = tensor_ranks(lowered, meshes), data_ranks(lowered, meshes)
    return FirstPasses(passes, alike, apart, kinds=kinds_hook(model, lowered, meshes))


def tell(plan: str, digest: str, known: KnownVerdict | None) -> None:
    """Logs the verdict on the plan, as a warning if it is not proved."""
    if known is not None:
        level = logging.INFO if known.level in ("proved", "verified") else logging.WARNING
        _log.log(level, "plan %s (%s): %s", plan, digest[:12], known.text)
