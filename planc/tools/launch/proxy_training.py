"""A proxy model of the family, trained on all ranks of a job under the plan, and on each rank
alone: the numbers must be the same on these nodes, with their links.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Diagnostic, Sink
from planc.ops.base import AxisRole
from planc.ops.document import digest, dumps
from planc.proof.small_case import SmallCase, small_case
from planc.proof.small_mesh import with_experts
from planc.proof.verify_report import report_difference
from planc.simulate.launcher import LIMITS, SEEDS, Comparison, Job, comparison
from planc.simulate.program import SingleError
from planc.simulate.trial_part import trial_part
from planc.simulate.worker import compare_with_reference
from planc.tools.launch.facts import device
from planc.tools.launch.peers import Peers

MOST = 64
"""Data ranks whose rows a single process reads too, for the comparison."""
SHARE = 0.5
"""The share of the time limit after which no proxy model is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyTraining:
    """The training of a proxy model on the ranks of a job.

    Args:
        compared: how far the numbers are from those of a single process; None where nothing ran.
        reason: why nothing ran.
        findings: what is wrong.
    """

    compared: Comparison | None = None
    reason: str = ""
    findings: tuple[Diagnostic, ...] = ()

    def document(self) -> dict[str, Any]:
        """The same as plain data."""
        fields = asdict(self.compared) if self.compared else {}
        return {"ran": self.compared is not None, "reason": self.reason, **fields}

    def __str__(self) -> str:
        if self.compared is None:
            return f"not trained: {self.reason}"
        if self.findings or self.reason:
            return self.reason or "trained otherwise than by one process"
        worst = max(self.compared.errors.values())
        return f"trained as by one process, within {worst:.0e}, in {self.compared.seconds:.1f} s"


def train(compiled: Compiled, ranks: Peers, *, allow_code: bool) -> ProxyTraining:
    """Trains it. Every rank calls it, with `distributed` started; the result is that of rank 0."""
    late = ranks.broadcast("whether there is time", ranks.seconds > SHARE * ranks.limit)
    why = "no time is left" if late else next(_not_run(compiled, allow_code), "")
    case = None if why else _case(compiled)
    if not isinstance(case, SmallCase):
        return ProxyTraining(reason=why or str(case))
    assert case.compiled.lowered is not None and case.compiled.plan is not None
    run = trial_part(case.compiled.lowered)
    job = Job(
        config=case.model.values,
        lowered=dumps(run),
        digest=digest(run),
        ranks=ranks.world_size,
        seeds=SEEDS[:1],
        limits=LIMITS,
        folder="",
        seconds=ranks.limit,
        code=compiled.facts.code if compiled.facts else "",
    )
    ranks.report_activity("training the proxy model")
    began = ranks.seconds
    numbers: dict[str, Any] = {"rank": ranks.rank, "device": device()}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    logging.disable(logging.WARNING)  # what torch says of small meshes is of no use here
    try:
        compare_with_reference(job, numbers)
    except SingleError as error:
        return ProxyTraining(reason=str(error))
    finally:
        logging.disable(logging.NOTSET)
    numbers_by_rank = ranks.gather("proxy model", numbers)
    return (
        _judge(numbers_by_rank, ranks.seconds - began, case, sink=Sink())
        if numbers_by_rank
        else ProxyTraining()
    )


def _judge(
    numbers_by_rank: list[dict[str, Any]], seconds: float, case: SmallCase, sink: Sink
) -> ProxyTraining:
    result = comparison(numbers_by_rank, seconds)
    if result.same:
        return ProxyTraining(compared=result)
    if result.chooses:
        reason = "it selects experts by rounded numbers, others for some tokens"
        return ProxyTraining(compared=result, reason=reason)
    plan, lowered = case.compiled.plan, case.compiled.lowered
    assert plan is not None and lowered is not None
    report_difference(result, plan, trial_part(lowered), sink)
    return ProxyTraining(compared=result, findings=tuple(sink))


def _not_run(compiled: Compiled, allow_code: bool) -> Iterator[str]:
    """Why it cannot be trained here, if it cannot."""
    plan, lowered = compiled.plan, compiled.lowered
    if plan is None or lowered is None or compiled.facts is None:
        yield "a lowered plan is for one model"
        return
    if lowered.backend:
        yield lowered.backend.UNPROVED
    if lowered.code and not allow_code:
        yield f"{lowered.code[0]} is code, imported only with --allow-code"
    data = prod(axis.size for axis in plan.mesh.of_role(AxisRole.DATA))
    if data > MOST:
        yield f"a single process would read the rows of {data} data ranks"


def _case(compiled: Compiled) -> SmallCase | str:
    """The proxy model on the mesh of the job."""
    assert compiled.plan is not None
    mesh = compiled.plan.mesh
    case = small_case(compiled, with_experts({a.name: a.size for a in mesh.axes}, mesh))
    return case if isinstance(case, SmallCase) else case.reason
