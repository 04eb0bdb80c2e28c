"""Rules that sum partial gradients, of replicated tensors that ranks use with different data."""

from collections.abc import Iterator

from planc.infer.flow_types import FoundRule, State
from planc.infer.interpret_operations import FlowOperations
from planc.model.dataflow import DataFlow, FlowCall, Operation
from planc.ops import styles as st
from planc.ops.styles import Replicate

_SLICES = frozenset({"split", "__getitem__", "chunk", "narrow", "split_with_sizes"})
_REASON = "each rank uses it with its own shard of other tensors, so its gradient is partial"


def gradient_sums(of: FlowOperations, state: State) -> Iterator[FoundRule]:
    """Yields the rules by which gradients are summed: those of what the whole tensors are made of
    that met varying ones, back to a linear that is whole, where the sum is sent once.
    """
    flow, stated, splits = of.flow, of.stated, of.splits
    slices, seen = dict[int, int](), set[int]()
    waiting = [(met.tensor, met) for met in state.met if not met.is_weight]
    while waiting:
        tensor, met = waiting.pop()
        if tensor in seen or tensor not in flow.live:
            continue
        seen.add(tensor)
        weights = tuple(dict.fromkeys(call.name for call in of.sources(met.varying, state)))
        sum_rule = FoundRule("", st.Replicated(summed=True), _REASON, weights, met.line)
        if tensor in flow.weights:
            holder, _, name = flow.weights[tensor].rpartition(".")
            layouts = ((name, st.ParameterLayout(layout=Replicate())),)
            yield sum_rule._replace(module=holder, style=st.Parameters(layouts=layouts))
            continue
        makers = of.makers.get(tensor, [])
        calls = [e for e in makers if isinstance(e, FlowCall)]
        for event in calls[:1] or makers[:1]:
            if isinstance(event, Operation):
                waiting += ((t, met) for t in event.inputs)
                if len(event.inputs) == 1 and event.name in _SLICES:
                    source = event.inputs[0]
                    slices[source] = max(slices.get(source, 0), flow.shapes[tensor][-1])
            elif event.name in stated:
                if any(isinstance(s, st.Replicated) for s in stated[event.name]):
                    waiting += ((t, met) for t in event.input_tensors)
            elif event.linear and event.name not in splits:
                rope = slices.get(tensor, flow.shapes[tensor][-1])
                beside = tuple(_rest_consumers(flow, tensor, rope))
                style = st.MlaKv(rope=rope)
                yield sum_rule._replace(module=event.name, style=style, beside=beside)
            elif event.name not in splits:
                yield sum_rule._replace(module=event.name)
                waiting += ((t, met) for t in event.input_tensors)


def _rest_consumers(flow: DataFlow, tensor: int, rope: int) -> Iterator[str]:
    """The modules that take the rest of a linear's output, and whose widths it has."""
    rest = flow.shapes[tensor][-1] - rope
    for call in flow.calls:
        for event in call.body:
            if isinstance(event, Operation) and event.inputs == (tensor,):
                for out in event.outputs:
                    if flow.shapes[out][-1] == rest:
                        yield from (c.name for c in flow.takers.get(out, ()) if c.weights)
