"""The collectives that operations imply in a step: kind, axes, times and bytes on one rank.

They are those of `run.forward_backward` and of the plan's optimizer; clipping sends more. Times and
bytes were compared with those of real processes (`tests/lowering/test_sends.py`). What is not
known is named (`left_out`), not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from math import ceil

from planc.lowering.context_collectives import context_collectives, layer_collectives
from planc.lowering.optimizer_collectives import optimizer_collectives
from planc.lowering.pipeline_collectives import pipeline_collectives
from planc.lowering.step import (
    EXCHANGE,
    GATHER,
    REDUCE,
    SCATTER,
    During,
    Sent,
    Step,
    again,
    collective_kind,
    gather_template,
    parameters_of,
)
from planc.model.facts import DTYPE_BYTES, Module, Modules, Parameter
from planc.ops.context import Attend, ContextParallel
from planc.ops.contract import Flow, Grad, Side, contract
from planc.ops.expert_capacity import LimitExperts
from planc.ops.expert_parallel import ALL_REDUCE, DispatchExperts
from planc.ops.fsdp import FullyShard
from planc.ops.layouts import Partial, Replicate, Shard
from planc.ops.lora import BASE_LAYER, Adapt
from planc.ops.optimizer import Optimize
from planc.ops.pipeline import Pipeline
from planc.ops.registry import AnyOp
from planc.ops.styles import Colwise, Experts, Input, Sequence
from planc.ops.tensor_parallel import Parallelize
from planc.sections import Hook


def step_collectives(step: Step) -> tuple[Sent, ...]:
    """The collectives of every operation, in order; equal ones of an operation are one."""
    counts: dict[Sent, int] = {}
    for sent in by_pass(step):
        key = replace(sent, times=0, during=During.STEP, modules=None)
        counts[key] = counts.get(key, 0) + sent.times
    return tuple(replace(key, times=times) for key, times in counts.items())


def by_pass(step: Step) -> Iterator[Sent]:
    """Yields every collective, unmerged: each pass and each set of modules apart."""
    for op in step.lowered.ops:
        for sent in _collectives(op, step):
            if sent.times and step.wide(sent.axes):
                yield sent


def left_out(step: Step) -> tuple[str, ...]:
    """Names what may send, and is not counted."""
    texts = (op.uncounted_traffic(step) for op in step.lowered.ops)
    return tuple(dict.fromkeys(filter(None, texts)))


_SENDS = Hook[Callable[[AnyOp, Step], Iterator[Sent]]]("lowering", "sends")


def _collectives(op: AnyOp, step: Step) -> Iterator[Sent]:
    match op:
        case Adapt():
            yield from _norms(op, step)
        case Parallelize():
            yield from _tensor(op, step)
        case FullyShard():
            yield from _fsdp(op, step)
        case ContextParallel():
            yield from context_collectives(op, step)
        case Attend():
            yield from layer_collectives(op, step)
        case DispatchExperts():
            yield from again(_exchanges(op, step), _repeats(op, step))
        case LimitExperts():
            yield from again(_choices(op, step), _repeats(op, step))
        case Pipeline():
            yield from pipeline_collectives(op, step)
        case Optimize():
            yield from optimizer_collectives(op, step)
        case _ if send := _SENDS.find(op.SECTION):
            yield from send(op, step)


def _repeats(op: Parallelize | DispatchExperts | LimitExperts, step: Step) -> Fraction:
    """The share of the forward passes of modules that backward repeats for a checkpoint.

    Early stopping ends before the last collective of a block, which nothing saves after.
    """
    for rule in step.lowered.checkpoint_ops:
        if not rule.save and op.modules.is_within(rule.modules):
            stops = rule.early_stop and isinstance(op, Parallelize) and _sums(op)
            stopped = stops and op.modules == _last(rule.modules, step)
            return Fraction(
                0 if stopped else step.backward.outputs(rule.modules), len(rule.modules)
            )
    return Fraction(0)


def _last(block: Modules, step: Step) -> Modules | None:
    """The last module of a block, where its output is a sum over the ranks that nothing saves: the
    second half of an adapter saves that of the first.
    """
    depth, order = len(block.path), [child.name for child in block.module.children]
    inside: dict[int, list[Parallelize | DispatchExperts]] = {}
    for op in step.lowered.ops:
        if isinstance(op, Parallelize | DispatchExperts) and len(op.modules.path) > depth:
            name = str(op.modules.path[depth])
            quiet = isinstance(op, Parallelize) and isinstance(op.style, Colwise | Sequence)
            if not quiet and op.modules.is_within(block) and name in order:
                inside.setdefault(order.index(name), []).append(op)
    last = inside[max(inside)] if inside else []
    sums = [o for o in last if isinstance(o, Parallelize) and _sums(o)]
    known = all(isinstance(o, Parallelize) and (_sums(o) or _before(o)) for o in last)
    adapted = (m for op in step.lowered.adapters for m in op.members)
    if not sums or not known or any(sums[-1].modules.is_within(m) for m in adapted):
        return None
    return sums[-1].modules


def _sums(op: Parallelize) -> bool:
    """Whether the output of the modules is a sum over the ranks."""
    return any(isinstance(flow.source, Partial) for flow in contract(op.style).gives)


def _before(op: Parallelize) -> bool:
    """Whether all that a style sends in a forward pass comes before its module runs."""
    style_contract = contract(op.style)
    return style_contract.counted and not any(
        collective_kind(*flow.forward) for flow in style_contract.gives
    )


# Operations --------------------------------------------------------------------------------------


def _tensor(op: Parallelize, step: Step) -> Iterator[Sent]:
    # the loss runs in place of the head
    heads = step.lowered.loss_heads
    if not step.wide(op.axes) or any(op.modules.is_within(head) for head in heads):
        return
    style_contract = contract(op.style, op.modules.module.kind)
    template = gather_template(op.WORD, op.modules, op.axes)
    runs = _runs(op, step)
    back, back_again = step.backward.inputs(op.modules), step.backward.outputs(op.modules)
    for flows, size, behind in zip(
        (style_contract.takes, style_contract.gives),
        _sizes(op, step),
        (back, back_again),
        strict=True,
    ):
        for flow in flows:
            template = replace(template, size=step.size(step.chosen) if flow.routed else size)
            if kind := collective_kind(*flow.forward):
                sent = replace(template, kind=kind, times=len(op.modules) * step.passes * runs)
                yield from again(iter([sent]), _repeats(op, step))
            if (kind := collective_kind(*flow.backward)) and _sums_here(op, flow, step):
                times = behind * step.passes * runs
                yield replace(template, kind=kind, times=times, during=During.BACKWARD)
    if (style_contract.sums or op.sums_all) and step.lowered.fsdp_units:
        times = step.backward.count_trained(op.modules) * step.reductions()
        for parameter, copies in _parameters(op.modules.module, inside=op.sums_all):
            sent = replace(template, kind=REDUCE, times=times * copies, during=During.STEP)
            yield replace(sent, size=parameter.numel * step.width)
    if isinstance(op.style, Experts) and step.lowered.fsdp_units:
        times = step.backward.count_trained(op.modules) * step.reductions()
        for size in _replicated_bytes(op, op.style, step):
            yield replace(template, kind=REDUCE, times=times, size=size, during=During.STEP)


def _norms(op: Adapt, step: Step) -> Iterator[Sent]:
    """Yields the collectives of DoRA's norms of rows, for layers whose columns are on several
    ranks, or whose output is gathered: a number a row, in float32.
    """
    for style in step.lowered.styles if op.dora else ():
        if not _is_adapted(op, style) or not any(
            collective_kind(*f.forward) for f in contract(style.style).gives
        ):
            continue
        _, rows = _features(style)
        sent = replace(
            gather_template(op.WORD, style.modules, style.axes),
            where=f"norms of {_layer(style)}",
            kind=REDUCE if _sums(style) else GATHER,
            times=len(style.modules) * step.passes,
            size=None if rows is None else 4 * rows,
        )
        yield from again(iter([sent]), _repeats(style, step))


def _is_adapted(op: Adapt, style: Parallelize) -> bool:
    """Whether a style is of a layer that has the adapter."""
    layer = _layer(style)
    inside = style.modules.path[-1:] == (BASE_LAYER,)
    return inside and any(layer.overlap(members) for members in op.members)


def _layer(style: Parallelize) -> Modules:
    """The layer that peft wraps, by the module inside it."""
    return Modules(style.modules.path[:-1], style.modules.module)


def _runs(op: Parallelize, step: Step) -> int:
    """The number of runs of modules in a forward pass: DoRA with dropout runs its layer on both
    inputs.
    """
    both = (a for a in step.lowered.adapters if a.dora and a.dropout and _is_adapted(a, op))
    return 2 if any(both) else 1


def _parameters(module: Module, *, inside: bool) -> Iterator[tuple[Parameter, int]]:
    """The parameters of a module, and of those inside, each with the number of its copies."""
    yield from ((parameter, 1) for parameter in module.parameters)
    for child in module.children if inside else ():
        copies = len(child.indices) if child.indices is not None else 1
        for parameter, times in _parameters(child.module, inside=True):
            yield parameter, times * copies


def _replicated_bytes(op: Parallelize, style: Experts, step: Step) -> Iterator[int]:
    """Bytes of the parameters that train of experts and are replicated over the ranks that split
    each expert: every rank has a part of the sum that is their gradient.
    """
    stated, experts = dict(style.layouts), step.lowered.experts
    split = any(
        op.modules.overlap(dispatch.modules) for dispatch in step.lowered.find_ops(DispatchExperts)
    )
    ranks = experts.ranks.size if split and experts is not None else 1
    for parameter in op.modules.module.parameters:
        if (
            parameter.trainable
            and parameter.name in stated
            and not isinstance(stated[parameter.name].layout, Shard)
        ):
            yield parameter.numel // ranks * step.width


def _sums_here(op: Parallelize, flow: Flow, step: Step) -> bool:
    """Whether a module redistributes the gradient of an activation itself.

    It does not if the gradient is partial, and a module around it passed the replicated input as
    a DTensor: that module then sums the gradients of all modules inside.
    """
    if flow.source != Replicate():
        return True
    match flow.gradient:
        case Grad.INVARIANT:
            return True
        case Grad.PARTIAL:
            return not _sums_above(op, step)
        case Grad.VARYING:
            styles = step.lowered.styles
            return any(rule.modules.is_within(op.modules) and _asks(rule) for rule in styles)


def _asks(op: Parallelize) -> bool:
    style_contract = contract(op.style, op.modules.module.kind)
    return any(f.gradient is Grad.PARTIAL and f.source == Replicate() for f in style_contract.takes)


def _sizes(op: Parallelize, step: Step) -> tuple[int | None, int | None]:
    """Bytes of an input and of an output of a module."""
    split = contract(op.style).splits in (Side.OUT, Side.IN)
    if not split and op.modules.module.kind not in ("linear", "conv1d"):
        return step.size(step.hidden), step.size(step.hidden)
    into, out = _features(op)
    return step.size(into), step.size(out)


def _features(op: Parallelize) -> tuple[int | None, int | None]:
    """The features of an input and of an output of a module, by its weight."""
    known = {p.name: p.shape for p in op.modules.module.parameters}
    known |= {s.name: s.shape for s in op.shapes}  # of an adapter's layer, these alone
    shape = known.get("weight", (None, None))
    out, into = shape[::-1] if op.modules.module.kind in ("embedding", "conv1d") else shape
    return into, out


def _sums_above(op: Parallelize, step: Step) -> bool:
    """Whether a module above gives this one DTensors, whose gradients are summed there; the second
    half of an adapter has its input from the first.
    """
    return op.modules.path[-2:-1] != ("lora_B",) and any(
        isinstance(rule.style, Input)
        and not rule.style.local
        and op.modules.is_within(rule.modules)
        for rule in step.lowered.styles
    )


def _fsdp(op: FullyShard, step: Step) -> Iterator[Sent]:
    units = 1 if op.group else sum(len(m) for m in op.members)
    stored = next((p.dtype for m in op.members for p in parameters_of(m)), "float32")
    width = DTYPE_BYTES[op.param or stored]
    trained = min(units, sum(map(step.backward.count_trained, op.members)))
    elements = ((op.gathered + op.saved) * units - op.frozen) // max(trained, 1) // width
    reduced = elements * DTYPE_BYTES[op.reduce or op.param or stored]
    template = Sent(
        word=op.WORD, where=op.name, kind=GATHER, axes=op.shard, times=units, size=op.gathered
    )
    if not op.gathered:
        return
    if op.reshard is False:
        gathers = units * (1 if step.lowered.pipeline else step.micro_batches)
    else:
        gathers = (units + _gathered_again(op, step)) * step.passes
    reductions = trained * step.reductions(op) if reduced else 0
    if op.shard:
        yield replace(template, times=gathers)
        yield replace(template, kind=SCATTER, times=reductions, size=reduced)
    if op.replicate:
        ranks, template = step.lowered.axis_size(*op.shard), replace(template, times=reductions)
        yield replace(template, kind=REDUCE, axes=op.replicate, size=reduced // ranks)


def _gathered_again(op: FullyShard, step: Step) -> int:
    """The units of an operation that a backward pass gathers: those it reaches, and the one before
    the first of them, which FSDP prefetches.
    """
    reached = step.backward.outputs(op.members[-1])
    prefetched = step.backward.nearest(o.members[-1] for o in step.lowered.fsdp_units if o.shard)
    return (min(reached, 1) if op.group else reached) + (prefetched is op.members[-1])


def _exchanges(op: DispatchExperts, step: Step) -> Iterator[Sent]:
    count, chosen = len(op.modules) * step.passes, step.chosen
    forward = replace(gather_template(op.WORD, op.modules, (op.axis,)), kind=EXCHANGE, times=count)
    into, out = (
        replace(forward, during=During.BACKWARD, times=reached(op.modules) * step.passes)
        for reached in (step.backward.inputs, step.backward.outputs)
    )
    states, weights = step.size(step.hidden), step.size(chosen)
    if op.batched:
        return
    if op.dispatch == ALL_REDUCE:
        yield replace(forward, kind=REDUCE, size=states)
        yield replace(into, kind=REDUCE, size=states)
        yield replace(into, kind=REDUCE, size=weights)
        return
    moves = (forward, count * 2), (into, into.times + out.times)  # to the experts, and back
    yield from _in_chunks(op, step, moves)
    if op.shared:  # early stopping ends before the results are joined
        joined = replace(into, kind=GATHER, axes=op.shared)
        yield replace(joined, size=states, times=count + into.times)
        yield replace(joined, size=weights)


def _in_chunks(
    op: DispatchExperts, step: Step, moves: Iterable[tuple[Sent, int]]
) -> Iterator[Sent]:
    """Yields the exchange of the number of tokens of each expert; then the states of tokens, once
    for each of their experts, and their weights, all in chunks.
    """
    states, weights, chosen = step.size(step.hidden), step.size(step.chosen), step.chosen
    split = step.lowered.axis_size(*op.shared)
    part = ceil(step.tokens / split) / step.tokens if step.tokens else None
    rows = None if states is None or chosen is None or part is None else states * chosen * part
    share = None if weights is None or part is None else weights * part
    (forward, _), _ = moves = tuple(moves)
    yield replace(forward, size=8 * op.shapes[0].shape[0] * op.chunks)
    for move, times in moves:
        each = None if rows is None else int(rows / op.chunks)
        yield replace(move, times=times * op.chunks, size=each)
        each = None if share is None else int(share / op.chunks)
        yield replace(move, times=move.times * op.chunks, size=each)


def _choices(op: LimitExperts, step: Step) -> Iterator[Sent]:
    """The experts of all tokens of a row, and their weights, 8 bytes for each choice."""
    if op.axis is None:
        return
    known = step.tokens is not None and step.chosen is not None
    size = 8 * (step.tokens or 0) * (step.chosen or 0) * step.lowered.axis_size(op.axis)
    times = len(op.modules) * step.passes
    yield replace(
        gather_template(op.WORD, op.modules, (op.axis,)), times=times, size=size if known else None
    )
