"""The methods of a run that give its weights to a serving engine; imported when asked."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from planc.diagnostics.diagnostic import PlanError
from planc.diagnostics.notebook import InNotebooks
from planc.ir.patches import BUCKET, HeldPatch
from planc.runtime.preconditions import stop

if TYPE_CHECKING:
    from planc.runtime.transfer import TransferPlan, WeightTransfer
    from planc.runtime.weight_source import WeightSource

SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Planner:
    """Computes what a run sends, from the lines of its plan.

    Args:
        transfer: to the ranks of a plan, by its name, its settings and world size, and whether its
            ranks are those of the run.
        full_tensors: the tensors of the files as blocks of the full tensors of the model.
    """

    transfer: Callable[[str, Sequence[str], int | None, bool], "TransferPlan"]
    full_tensors: Callable[[], Sequence[HeldPatch]]


PLANNERS: WeakKeyDictionary[nn.Module, Planner] = WeakKeyDictionary()
"""By the model that a plan was applied to."""


class SendsWeights(InNotebooks):
    """The methods of a run that give its weights to an engine."""

    __slots__ = ()
    model: nn.Module

    def transfer(
        self,
        plan: str | os.PathLike[str],
        *,
        address: str | None = None,
        overrides: Sequence[str] = (),
        world_size: int | None = None,
        adapters: Literal["merged", "left_out"] | None = None,
        bucket: int = BUCKET,
        tensors: Mapping[str, Tensor] | None = None,
        delta: bool = False,
        seconds: float = SECONDS,
    ) -> "WeightTransfer":
        """Joins the ranks of a serving engine, which get the weights at each `publish()`.

            transfer = run.transfer("rollout.plan", address="node0:29600")
            for batches in steps:
                ...
                transfer.publish()
            transfer.close()

        Each process of the engine calls `planc.join_transfer("node0:29600", rank=...)`, and
        `receive()` for each `publish()`. Every rank of the run calls these.

        Args:
            plan: with a serve section, or another training plan.
            address: `host:port`, free on the node of rank 0. Without one the ranks of the run are
                those of the engine too, on one node.
            overrides: `name=value` for the plan.
            world_size: the number of ranks of the engine, if the plan is a training plan.
            adapters: `merged`, or `left_out`; as for `export`.
            bucket: the bytes that a rank sends or receives at once.
            tensors: the engine's on this rank, where it has both sides; by default allocated.
            delta: whether a publish sends only blocks of 4 KiB with a byte that changed since the
                last one. Senders keep a copy of all that they sent, and the engine must not change
                its tensors.
            seconds: after which a process that does not answer counts as lost.

        Raises:
            PlanError: PL189, PL686, adapters or compressed weights that cannot be sent; PL695, the
                slices that ranks hold are not known; PL697, the sides do not fit each other, and
                nothing was sent; PL698, a process did not join.
        """
        planner = self._planner()
        from planc.runtime.transfer import start_transfer

        return start_transfer(
            self.model,
            planner.transfer(os.fspath(plan), tuple(overrides), world_size, address is None),
            address=address,
            bucket=bucket,
            seconds=seconds,
            adapters=adapters,
            tensors=tensors,
            delta=delta,
        )

    def weight_source(
        self, *, adapters: Literal["merged", "left_out"] | None = None
    ) -> "WeightSource":
        """The weights as tensors of the model's files, by the methods of vLLM's `WeightSource`.

        Each rank yields the full tensors of its own stage, gathered over their own meshes.

        Args:
            adapters: `merged`, or `left_out`; as for `export`.

        Raises:
            PlanError: PL189, PL686, adapters or compressed weights that cannot be sent; PL695, the
                slices that ranks hold are not known.
        """
        planner = self._planner()
        from planc.runtime.weight_source import WeightSource
        from planc.runtime.weights.peft_files import merge_findings

        if found := merge_findings(self.model, adapters):
            raise PlanError(found)
        merged = adapters == "merged"
        return WeightSource(self.model, planner.full_tensors(), merged=merged)

    def _planner(self) -> Planner:
        if self.model not in PLANNERS:
            text = "a lowered plan has no lines that say which slices ranks hold"
            raise stop("PL695", text, help="apply the plan by its name")
        return PLANNERS[self.model]
