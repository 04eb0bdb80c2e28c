"""Records what the ranks of a plan call in a step, each alone on a fake process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from planc.compiler import Compiled
from planc.ir.nodes import Plan
from planc.ir.stand_in import Unrepresented
from planc.lowering.rank_calls import Groups, RankCall, calls, pipeline_rank_of
from planc.lowering.step import Step
from planc.model.facts import most_stored
from planc.ops.base import AxisRole
from planc.ops.document import dumps
from planc.ops.lowered import Lowered
from planc.proof.small_case import small_case
from planc.proof.small_mesh import MOST, fewest, for_schedule_file, longer, with_experts
from planc.simulate.rank_job import RankJob, RankRunner, RankStep
from planc.tools.measure.count import NotCountedError, require_runnable

_TOKENS = 64
_RANKS = 16
"""The most ranks of a small mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """
    Args:
        lowered: the plan that was run.
        first: the calls of each rank in the first step, in which stages announce the shapes that
            they send.
        later: the calls of each rank in every other step.
    """

    lowered: Lowered
    first: Mapping[int, tuple[RankCall, ...]]
    later: Mapping[int, tuple[RankCall, ...]]

    def pipeline_rank(self, rank: int) -> int:
        """The pipeline rank of a global rank."""
        return pipeline_rank_of(self.lowered, rank)


def record_ranks(
    compiled: Compiled,
    ranks: Sequence[int],
    runner: RankRunner,
    *,
    rows: int = 0,
    tokens: int = _TOKENS,
    micro_batches: int = 1,
    allow_code: bool = False,
    real: bool = False,
) -> Order:
    """Runs ranks of a plan, the first stage's before those of others.

    Args:
        compiled: a plan without errors, for a transformers model.
        ranks: of its mesh.
        runner: that runs them.
        rows, tokens, micro_batches: of each pass of a rank, and passes; at most two are run. By
            default as few rows as a pipeline needs.
        allow_code: whether the plan's custom styles may be imported.
        real: whether the model is small enough to be run on tensors with memory, which is faster.

    Raises:
        NotCountedError: a rank cannot be run so.
    """
    require_runnable(compiled)
    lowered, facts = compiled.lowered, compiled.facts
    assert lowered is not None and facts is not None
    pipeline, groups = lowered.pipeline, Groups(lowered)
    if lowered.code and not allow_code:
        raise NotCountedError(f"{lowered.code[0]} is code, imported only with --allow-code")
    job = RankJob(
        step=RankStep(
            rows=rows or (pipeline.microbatches if pipeline else 1),
            tokens=tokens,
            micro_batches=micro_batches,
            dtype=most_stored(facts),
        ),
        config={**facts.config, "architectures": [facts.name]},
        lowered=dumps(lowered),
        digest=compiled.digest,
        rank=0,
        order=True,
        device="cpu" if real else "",  # faster where tensors are small
        code=allow_code,
    )
    steps_by_rank: dict[int, list[tuple[RankCall, ...]]] = {}
    form: list[object] = []
    for rank in sorted({*ranks} | ({0} if pipeline else set())):
        answer = runner.ask(
            replace(job, rank=rank, form=form if pipeline_rank_of(lowered, rank) else [])
        )
        if "error" in answer:
            raise NotCountedError(f"rank {rank}: {answer['error']}")
        form = form or answer["form"]
        steps_by_rank[rank] = [
            tuple(calls(step, rank, lowered, groups)) for step in answer["steps"]
        ]
    first, later = ({rank: steps[i] for rank, steps in steps_by_rank.items()} for i in (0, 1))
    return Order(lowered=lowered, first=first, later=later)


def of_places(compiled: Compiled, step: Step) -> Order:
    """The order of the first rank of each pipeline rank, of the model as it is.

    Args:
        compiled: a plan without errors.
        step: its batch; where it has none, as few rows as a pipeline needs, of a few tokens.

    Raises:
        NotCountedError: a rank cannot be run alone.
    """
    lowered = step.lowered
    stride = lowered.stride(lowered.pipeline.axis) if lowered.pipeline else 1
    ranks = [place * stride for place in range(len(lowered.stages))]
    rows = (step.batch or 0) // (step.ranks * step.micro_batches)
    tensor = prod(axis.size for axis in lowered.axes if axis.role is AxisRole.TENSOR)
    least = step.divisors[1] * tensor
    with RankRunner() as runner:
        return record_ranks(
            compiled,
            ranks,
            runner,
            rows=rows,
            tokens=step.sequence or least * max(1, _TOKENS // least),
            micro_batches=step.micro_batches,
        )


def small_orders(
    compiled: Compiled, runner: RankRunner, *, allow_code: bool = False
) -> Iterator[Order]:
    """The orders of all ranks of small meshes, with a proxy model, in steps of several passes.

    Raises:
        NotCountedError: there is no such model, or its ranks cannot be run.
    """
    require_runnable(compiled)
    plan = compiled.plan
    assert plan is not None
    for sizes in small_meshes(plan):
        small = small_case(compiled, with_experts(for_schedule_file(sizes, plan), plan.mesh))
        if isinstance(small, Unrepresented):
            raise NotCountedError(small.reason)
        assert small.compiled.lowered is not None
        ranks = range(small.compiled.lowered.world_size)
        passes = 1 if plan.pipeline else 2  # a pipeline's microbatches are passes
        # what another rank would send of a batch or a stage has no values, which code may read
        real = not (plan.pipeline or plan.context)
        yield record_ranks(
            small.compiled, ranks, runner, micro_batches=passes, allow_code=allow_code, real=real
        )


def small_meshes(plan: Plan) -> Iterator[dict[str, int]]:
    """The sizes of axes of the meshes whose ranks are run: all of a mesh with at most `MOST` ranks.

    Else each axis of more than one rank has 2, or 3 if that many; the outermost have one where
    these are more than `_RANKS`. A longer pipeline is run a second time with 4 places or 3, on the
    innermost axis of data: a message can cross another only where a place has two neighbors.
    """
    real = {axis.name: axis.size for axis in plan.mesh.axes}
    if prod(real.values()) <= MOST:
        yield real
        return
    small = {name: fewest(size) for name, size in real.items()}
    data = [a.name for a in plan.mesh.of_role(AxisRole.DATA) if small[a.name] > 1]
    for name in (*data, *small):
        if prod(small.values()) > _RANKS:
            small[name] = 1
    yield small
    stages = plan.pipeline.op.axis if plan.pipeline else ""
    if stages and real[stages] > 3:
        places = longer(real[stages])
        yield {**dict.fromkeys(real, 1), **dict.fromkeys(data[-1:], 2), stages: places}
