"""The order of a model's forward before, in and after its blocks, read off its recorded data flow.

A pipeline cuts a model between two blocks of a list. Which modules belong to the first stage and
which to the last one, what a block returns, and which values reach a block from earlier ones
besides the hidden states is known to the model's own code alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from planc.model.dataflow import DataFlow, FlowCall, Operation
from planc.model.facts import Facts, below, generic
from planc.model.layer_kinds import length
from planc.model.module_table import puts_images
from planc.proxy.flow import flow_of, flow_source

_LAYERS = 2
"""The layers of the proxy model: the modules around its blocks are around the real model's blocks
too."""
_OF_TOWERS = ("pixel_values", "input_features")
"""Inputs that a tower reads, which only the first stage has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """The order of a forward pass. Names of modules have `*` for indices.

    Args:
        after: modules with parameters that run after the last block.
        apart: those that run between two blocks, or before and after them.
        returned: the number of values in the tuple that a block returns; 0 for a plain tensor.
        given: arguments of blocks, besides hidden states, that modules before the blocks computed
            from activations.
        states: arguments of blocks that earlier blocks computed.
        again: modules before the blocks that compute other arguments, from positions alone; each
            stage runs them.
        before: modules without parameters whose results are a part of the first block's hidden
            states, and of no other argument of a block.
        problem: why the list cannot be cut at all; empty if it can.
    """

    after: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    returned: int = 0
    given: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    again: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    problem: str = ""


def block_order(facts: Facts, blocks: str) -> BlockOrder:
    """The order in which a model runs its modules around a list of blocks.

    Args:
        facts: the model; if it has code, running it is allowed.
        blocks: the torch name of the list, such as `model.layers`.
    """
    key = ("block_order", blocks)
    if key not in facts.memo:
        source = flow_source(facts, {}, _LAYERS)
        flow = source if isinstance(source, str) else flow_of(source, facts)
        if isinstance(source, str) or isinstance(flow, str):
            return BlockOrder(problem=str(flow))
        count, images = length(source.facts.module_at(blocks)), any(puts_images(facts))
        facts.remember(key, _order(flow, blocks, count, images=images))
    order: BlockOrder = facts.memo[key]
    return order


def _order(flow: DataFlow, blocks: str, count: int, *, images: bool) -> BlockOrder:
    """The order around a list of so many blocks; `images` are left out on later stages."""
    calls = [c for c in flow.calls if c.name.rpartition(".")[0] == blocks]
    returned = {_return_count(call) for call in calls}
    problem = ""
    if [call.name for call in calls] != [f"{blocks}.{i}" for i in range(count)]:
        problem = f"the model does not call the blocks of `{blocks}` once each, in order"
    elif len(returned) != 1 or -1 in returned:
        problem = f"the blocks of `{blocks}` return no tensor and no tuple of one size"
    elif not images and (read := next((n for n, _ in flow.root.arguments if n in _OF_TOWERS), "")):
        # the features take the places of tokens, which on a later stage are received already
        problem = f"on every stage its code puts features of `{read}` among the hidden states"
    elif images and (weight := _read_around(flow, blocks)):
        problem = f"on every stage its code reads numbers of `{weight}`, which only the first has"
    elif taken := _taken_behind(flow, calls, blocks):
        problem = f"behind its blocks `{taken}` takes what modules before them compute"
    if problem:
        return BlockOrder(problem=problem)
    places = [flow.calls.index(calls[i]) for i in (0, -1)]
    first, between, last = (
        {generic(call.name) for call in part if call.weights and not _is_inside(call, blocks)}
        for part in (flow.calls[: places[0]], flow.calls[slice(*places)], flow.calls[places[1] :])
    )
    given, states, again = _crossing(flow, calls)
    return BlockOrder(
        after=frozenset(last - between - first),
        apart=frozenset(between | first & last) - again,
        returned=returned.pop(),
        given=given,
        states=states,
        again=again,
        before=_before(flow, flow.calls[: places[0]], calls),
    )


def _read_around(flow: DataFlow, blocks: str) -> str:
    """A parameter of another module that the code of one around the blocks reads, or none."""
    around = [c for c in flow.calls if below(blocks, c.name) or not c.name]
    taken = (
        operation.inputs for c in around for operation in c.body if isinstance(operation, Operation)
    )
    read = (flow.weights[t] for inputs in taken for t in inputs if t in flow.weights)
    holders = {c.name for c in around}
    return next((name for name in read if name.rpartition(".")[0] not in holders), "")


def _taken_behind(flow: DataFlow, calls: Sequence[FlowCall], blocks: str) -> str:
    """A module behind the blocks that takes activations from before them, or none."""
    later = _after_blocks(flow, {call.name for call in calls})
    behind = flow.calls[flow.calls.index(calls[-1]) :]
    return next(
        (
            generic(call.name)
            for call in behind
            if not _is_inside(call, blocks)
            for tensor in call.input_tensors
            if tensor in flow.live - later and flow.hidden(tensor)
        ),
        "",
    )


def _is_inside(call: FlowCall, blocks: str) -> bool:
    return call.name == blocks or below(call.name, blocks)


def _return_count(call: FlowCall) -> int:
    """The number of values in the tuple that a call returns; 0 for a tensor, -1 for others."""
    if call.outputs and call.outputs[0][0] is None:
        return 0
    return -1 if call.structured else call.length or -1


def _crossing(
    flow: DataFlow, blocks: Sequence[FlowCall]
) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """The values that reach blocks besides hidden states, as `given`, `states` and `again` of an
    order.
    """
    given, states, again = dict[str, None](), dict[str, None](), set[str]()
    later = _after_blocks(flow, {call.name for call in blocks})
    for call in blocks[1:]:
        hidden = call.arguments[0][1] if call.arguments else None
        states.update(dict.fromkeys(name for name, held in call.holding if held in later))
        for name, tensor in call.arguments:
            if tensor not in flow.live or tensor == hidden:
                continue
            if tensor in later:
                states[name] = None
            elif (shape := flow.shapes[tensor])[0] == flow.rows and len(shape) == 3:
                given[name] = None
            else:
                again |= {generic(m.rpartition(".")[0]) for m in _made_of(tensor, flow)}
    return tuple(given), tuple(states), frozenset(again)


def _before(
    flow: DataFlow, calls: Sequence[FlowCall], blocks: Sequence[FlowCall]
) -> frozenset[str]:
    """`BlockOrder.before`, of the calls before the first block."""
    hidden = _sources([t for _, t in blocks[0].arguments[:1]], flow)
    others = _sources([t for call in blocks for _, t in call.arguments[1:]], flow)
    return frozenset(
        generic(call.name)
        for call in calls
        if not any(inner.weights for inner in call.below())
        and not hidden.isdisjoint(call.output_tensors)
        and others.isdisjoint(call.output_tensors)
    )


def _after_blocks(flow: DataFlow, blocks: Set[str]) -> set[int]:
    """The tensors that depend on what a block returns."""
    tensors = set[int]()
    waiting: list[FlowCall | Operation] = [flow.root]
    while waiting:
        event = waiting.pop()
        if isinstance(event, Operation):
            if not tensors.isdisjoint(event.inputs):
                tensors.update(event.outputs)
        elif event.name in blocks:
            inside = (inner for call in event.below() for inner in call.body)
            tensors.update(
                n for inner in inside if isinstance(inner, Operation) for n in inner.outputs
            )
            tensors.update(event.output_tensors, event.nested)
        else:
            waiting += reversed(event.body)
    return tensors


def _made_of(tensor: int, flow: DataFlow) -> set[str]:
    """The names of the parameters that a tensor depends on."""
    return {flow.weights[n] for n in _sources([tensor], flow) if n in flow.weights}


def _sources(tensors: Iterable[int], flow: DataFlow) -> set[int]:
    """Some tensors, and those that they are computed from."""
    known = {*tensors}
    waiting = [*known]
    while waiting:
        makers = flow.makers.get(waiting.pop(), ())
        more = {n for maker in makers for n in maker.inputs} - known
        known |= more
        waiting += more
    return known
