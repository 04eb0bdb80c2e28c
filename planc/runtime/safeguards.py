"""What `planc.apply` asks for besides a plan: verdicts, equal weights and inputs.

The exchange of the ranks that compares lowered plans says it, so that all go on or stop together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import distributed, nn

from planc.diagnostic import PlanError
from planc.ops.lowered import Lowered
from planc.runtime.known_verdict import KnownVerdict, Required, accept, strongest
from planc.runtime.meshes import Meshes
from planc.runtime.same_inputs import FirstPasses, data_ranks, tensor_ranks
from planc.runtime.same_kinds import kinds_hook
from planc.runtime.same_weights import WeightSums, unequal, weight_sums

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

    def statement(self, model: nn.Module, lowered: Lowered) -> Statement:
        """What this rank says to the others, before the model is touched."""
        compares = self.compare > 0 and lowered.world_size > 1
        return Statement(self, weight_sums(model) if compares else None)


@dataclass(frozen=True, slots=True)
class Statement:
    """What one rank says: what it asks for, its verdict, sums of its weights if compared."""

    asked: Safeguards
    sums: WeightSums | None

    @property
    def short(self) -> tuple[KnownVerdict | None, str]:
        """The verdict, and one checksum of all weights."""
        return self.asked.known, self.sums.total if self.sums else ""


Said = Sequence[tuple[KnownVerdict | None, str]]
"""The statements of all ranks, by rank."""


def accepted(own: Statement, said: Said) -> None:
    """Refuses the plan as `accept` does, on every rank."""
    accept(strongest(known for known, _ in said), own.asked.require)


def first_passes(
    model: nn.Module, lowered: Lowered, meshes: Meshes, own: Statement, said: Said
) -> FirstPasses:
    """What is compared when the model runs first; a collective where the ranks' weights differ."""
    passes = own.asked.compare
    first = FirstPasses()
    if passes:
        first = FirstPasses(passes, tensor_ranks(lowered, meshes), data_ranks(lowered, meshes))
        first.kinds = kinds_hook(model, lowered, meshes)
    totals = [total for _, total in said]
    if own.sums is None or not all(totals):
        return first
    found = unequal(model, lowered, own.sums, totals, meshes.root.device_type)
    if found is not None:
        first.different_weights = PlanError([found])
        if distributed.get_rank() == 0:
            _log.warning("%s; `run.load` is to replace them before the first pass", found.message)
    return first


def tell(plan: str, digest: str, said: Said) -> None:
    """Logs the verdict on the plan, as a warning if it is not proved."""
    known = strongest(known for known, _ in said)
    if known is not None:
        level = logging.INFO if known.level in ("proved", "verified") else logging.WARNING
        _log.log(level, "plan %s (%s): %s", plan, digest[:12], known.text)
