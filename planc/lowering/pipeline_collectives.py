"""Messages between the stages of a pipeline: to the next one for each microbatch, back the
gradients of its tensors, and between several those of parameters that they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from math import prod
from typing import NamedTuple

from planc.lowering.step import SEND, Sent, Step
from planc.model.block_arguments import ArgumentForm, BlockArguments, block_arguments
from planc.model.facts import DTYPE_BYTES, Facts, Modules
from planc.ops.base import AxisRole
from planc.ops.contract import contract
from planc.ops.layouts import Partial, Shard
from planc.ops.pipeline import Pipeline, stages_of_rank

_ALIGNED = 16
"""Bytes to a multiple of which each of several tensors in a message is padded
(`planc.runtime.standalone.pipeline_messages`).
"""


class StageMessages(NamedTuple):
    """Bytes between a stage and the next one for a microbatch, None where they are not known.

    Args:
        there: hidden states, and what goes beside them.
        back: their gradients.
    """

    there: int | None
    back: int | None


def arguments_of(op: Pipeline | None, facts: Facts) -> BlockArguments | None:
    """The arguments of a pipeline's blocks, if stages send more than hidden states; else None."""
    sent = (*op.given, *op.states) if op else ()
    return block_arguments(facts, str(op.blocks), sent) if op and sent else None


def messages(op: Pipeline, step: Step) -> list[StageMessages]:
    """The messages that each stage but the last one sends, in order."""
    return [_message(op, stage, step) for stage in range(op.stages - 1)]


def _message(op: Pipeline, stage: int, step: Step) -> StageMessages:
    tensor = [a.name for a in step.lowered.axes if a.role is AxisRole.TENSOR]
    ranks, begins = step.lowered.axis_size(*tensor), op.bounds[stage + 1]
    if not (op.given or op.states):
        whole = step.size(step.hidden)
        if whole is None:
            return StageMessages(None, None)
        # features of images that later blocks add
        each = whole // (ranks if _are_sharded(step) else 1) * (1 + max(0, op.added - begins))
        return StageMessages(each, each)
    if step.arguments is None or step.tokens is None:
        return StageMessages(None, None)
    forms = step.arguments.sent_forms(begins, op.given, op.states)
    sizes = [_local(form, step, ranks) for form in forms]
    trained = [size for size, form in zip(sizes, forms, strict=True) if form.trains]
    return StageMessages(_message_bytes(sizes), _message_bytes(trained))


def _message_bytes(sizes: Sequence[int | None]) -> int | None:
    """Bytes of a message with tensors of these sizes, None where one is not known."""
    if len(sizes) == 1:
        return sizes[0]
    known = [-(-n // _ALIGNED) * _ALIGNED for n in sizes if n is not None]
    return sum(known) if len(known) == len(sizes) else None


def _local(form: ArgumentForm, step: Step, ranks: int) -> int | None:
    """Bytes of a tensor on one of the ranks that split weights, None where it is not known how they
    divide it: states of tokens as the hidden states, heads as the projection that gives them.
    """
    assert step.batch is not None and step.sequence is not None
    rows, tokens = step.batch // step.divisors[0], step.sequence // step.lowered.sequence_parts
    whole = form.size(rows, tokens, step.width)
    if ranks == 1:
        return whole
    if form.shape[-3:-1] == (-1, -2):
        return whole // (ranks if _are_sharded(step) else 1)
    if len(form.shape) != 4 or (form.shape[0], form.shape[2]) != (-1, -2):
        return None
    features = form.shape[1] * form.shape[3]
    split = (s for o in step.lowered.styles for s in o.shapes if s.name == "weight")
    return whole // next((ranks for s in split if s.shape[0] == features != s.local[0]), 1)


def pipeline_collectives(op: Pipeline, step: Step) -> Iterator[Sent]:
    """Once for all stages: the ranks of a stage send to those of the next, and back. Of one place
    alone what its ranks send.
    """
    if op != step.lowered.pipeline:
        return
    stages = op.own if len(step.lowered.stages) == 1 else range(op.stages)
    ranks = step.lowered.axis_size(op.axis)
    home = {s: r for r in range(ranks) for s in stages_of_rank(op.schedule, r, ranks, op.stages)}
    sent = Sent(word=op.WORD, where="", kind=SEND, axes=(op.axis,), times=step.passes, size=None)
    for stage, message in enumerate(messages(op, step)):
        ways = ((stage, stage + 1, message.there), (stage + 1, stage, message.back))
        for start, end, size in ways:
            if home[stage] != home[stage + 1] and start in stages:
                yield replace(sent, where=f"stage {start} -> {end}", size=size)
    held: dict[frozenset[int], int] = {}
    for shared in op.shares:  # each rank that holds one sends its gradient to the others
        places = frozenset(home[stage] for stage in shared.stages)
        held[places] = held.get(places, 0) + len(shared.parameters)
        times = _pairs(places, {home[stage] for stage in stages})
        for name in shared.parameters if times else ():
            size = _shard(name, shared.modules, step)
            yield replace(sent, where=name, times=times, size=size)
    for places, count in held.items():  # an int32 for each: whether a rank has a gradient
        times = _pairs(places, {home[stage] for stage in stages})
        where = f"who has gradients of {count} shared parameter{'s' * (count > 1)}"
        yield replace(sent, where=where, times=times, size=4 * count)


def _pairs(holders: Set[int], senders: Set[int]) -> int:
    """The messages that some ranks send where each holder sends one to each other."""
    return len(holders & senders) * (len(holders) - 1)


def _shard(name: str, modules: tuple[Modules, ...], step: Step) -> int | None:
    """Bytes of a rank's part of a shared parameter's gradient."""
    path, _, last = name.rpartition(".")
    candidates = (*modules, *(o.modules for o in step.backward.owners))
    owner = next((m for m in candidates if m.has(path)), None)
    parameter = owner.module.parameter(last) if owner else None
    if parameter is None:
        return None
    split = [s for o in step.lowered.styles if o.modules.has(path) for s in o.shapes]
    local = next((prod(s.local) for s in split if s.name == last), parameter.numel)
    ranks = next((step.lowered.axis_size(*o.shard) for o in step.lowered.fsdp_units), 1)
    return local // ranks * DTYPE_BYTES[parameter.dtype]


def _are_sharded(step: Step) -> bool:
    """Whether the hidden states between blocks are sequence shards."""
    flows = (flow.forward for op in step.lowered.styles for flow in contract(op.style).gives)
    return any(isinstance(a, Partial) and isinstance(b, Shard) for a, b in flows)
