"""The costs of the optimizer section of a plan: states, exchanges, iterations, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import ceil, prod
from typing import Literal

from planc.ir.nodes import OptimizerRule, Plan
from planc.ir.optimizer_groups import is_matrix, rules_around
from planc.lowering.memory import Holding, Holdings
from planc.lowering.optimizer_collectives import Buckets, Matrices, buckets_of
from planc.lowering.step import Step
from planc.model.facts import DTYPE_BYTES, Parameter
from planc.ops.base import kind_of
from planc.ops.lowered import Stage
from planc.ops.optimizer import AT_ONCE, BUCKET, Adafactor, Muon, Optimize
from planc.tools.estimate.workload import Collective, Group, Update

Where = Literal["device", "host", "checkpoint"]


def states_of(holding: Holding, plan: Plan, ranks: int, where: Where) -> int:
    """Bytes of the states of some parameters, as the optimizer section has them, on all of the
    ranks that shard them: of those that stay on the device, of those that are offloaded, or of all
    as a checkpoint has them.
    """
    size = 0
    for count, rule in _stepping_rules(holding, plan):
        whole, shape, copies = holding.parameter.shape, holding.local, 1
        if isinstance(rule.op.algorithm, Adafactor) and len(shape) > 1:  # whole on each
            shape, copies = whole, ranks
        stored = where == "checkpoint"
        if stored or rule.op.offload == (where == "host"):
            count_of = rule.op.saved_bytes if stored else rule.op.state_bytes
            size += count * copies * count_of(whole, shape, holding.parameter.dtype)
    return size


def _stepping_rules(holding: Holding, plan: Plan) -> Iterator[tuple[int, OptimizerRule]]:
    """Yields the number of these parameters that each rule steps."""
    if not holding.trains:
        return
    every = len(holding.modules)
    for piece, rule, other in rules_around(holding.modules, plan):
        chosen = rule if is_matrix(piece, holding.parameter) else other
        if chosen is not None:
            yield holding.count * len(piece) // every, chosen


def update_of(
    stage: Stage, step: Step, plan: Plan, holdings: Holdings, group: Callable[..., Group]
) -> Update:
    """The update on one pipeline rank.

    Args:
        stage: the operations of that rank.
        holdings: the parameters of all pipeline ranks.
        group: the ranks along some axes.
    """
    ops = [op for op in stage.ops if isinstance(op, Optimize)]
    buckets = [*buckets_of(stage, step)]
    exchanged = (
        Collective(kind=one.kind, size=one.size or 0, group=group(*one.axes), count=one.times)
        for one in (bucket.communication for bucket in buckets)
        if one.axes
    )
    every = (turn for b in buckets for one in b.matrices for turn in _turns(one, step))
    held = (_bucket_bytes(bucket, step) for bucket in buckets)
    return Update(
        name=" and ".join(dict.fromkeys(kind_of(type(op.algorithm)) for op in ops)),
        exchanged=tuple(exchanged),
        turned=tuple(every),
        held=max([*held, *_copies(holdings, plan)], default=0),
        moved=_MOVED * sum(_rounded_states(holdings, plan)),
        origin=plan.optimizer[0].origin,
    )


def _bucket_bytes(bucket: Buckets, step: Step) -> float:
    """Bytes of a rank's shards, of what it sends of them and of what it receives; or of shards and
    whole matrices, beside what an iteration computes with.
    """
    size, most = bucket.size or 0, 0
    for rows, columns, _, full, count in (t for one in bucket.matrices for t in _turns(one, step)):
        elements, gram = rows * columns, min(rows, columns) ** 2
        at_once = min(ceil(count), max(1, AT_ONCE // elements))
        most = max(most, 2 * at_once * (elements + gram) * (4 if full else 2))
    return max(3 * size, 2 * size + most)


def _turns(one: Matrices, step: Step) -> Iterator[tuple[int, int, int, bool, float]]:
    """The matrices of some parameters, as `Update.turned` has them."""
    algorithm = one.op.algorithm
    if not isinstance(algorithm, Muon) or one.parameter is None:
        return
    *entries, rows, columns = one.parameter.shape
    count = one.count * prod(entries) / step.lowered.axis_size(*one.axes)
    full = algorithm.compute not in ("bfloat16", "float16")
    along = one.cut.dim - len(entries)
    sizes = one.cut.sizes or ((rows,) if along <= 0 else (columns,))
    for size in sizes:
        shape = (size, columns) if along <= 0 else (rows, size)
        yield *shape, algorithm.ns_steps, full, count


_MOVED = 90
"""Bytes that a state in 8 bits moves when it is read and rounded again: on an H100 a step of AdamW
took 42 ms longer for 617M parameters (docs/how-to/optimizers.md)."""


def _shards(holdings: Holdings, plan: Plan) -> Iterator[tuple[Parameter, int, int, OptimizerRule]]:
    """Each parameter of a rank, how many like it a rule steps, and the elements of a shard."""
    for held in holdings.all:
        shard = held.sharded_bytes(holdings.ranks(held)) // DTYPE_BYTES[held.parameter.dtype]
        for count, rule in _stepping_rules(held, plan):
            yield held.parameter, count, shard, rule


def _rounded_states(holdings: Holdings, plan: Plan) -> Iterator[float]:
    """Yields the numbers of states that a rank rounds to 8 bits."""
    for parameter, count, shard, rule in _shards(holdings, plan):
        if rule.op.in_eight_bits(parameter.shape):
            yield count * shard * rule.op.algorithm.state_size((1,))


_ROUNDING = 8
"""Bytes that finding the code of a number takes: the number over its scale, and its place."""


def _copies(holdings: Holdings, plan: Plan) -> Iterable[float]:
    """Bytes that steps of elementwise algorithms hold: a copy of what they step at once, and of the
    states in its dtype where they have another.
    """
    factored = 0.0  # updates of a bucket
    for parameter, count, shard, rule in _shards(holdings, plan):
        width = DTYPE_BYTES[parameter.dtype]
        if isinstance(rule.op.algorithm, Adafactor):
            factored += count * shard * width
        elif not isinstance(rule.op.algorithm, Muon):
            eight = rule.op.in_eight_bits(parameter.shape)
            other = rule.op.state not in (None, parameter.dtype) or eight or rule.op.offload
            states = rule.op.algorithm.state_size((1,)) if other else 0
            rounded = eight * shard * _ROUNDING
            yield min(count * shard, max(shard, AT_ONCE)) * width * (1 + states) + rounded
    yield min(factored, BUCKET * 4)
