"""The process groups that only some places of a pipeline use."""

from collections.abc import Iterator

from planc.ops import call
from planc.ops.lowered import Lowered, Stage

_CREATE = ("._flatten", "standalone.expert_parallel:mesh_of_experts")


def uneven_groups(lowered: Lowered, context: call.Context) -> tuple[call.Shared, ...]:
    """The calls that create process groups, where they differ between the places of a pipeline.

    Every rank takes part in each creation, in one order, so all of them then come before the
    operations. Nothing where each place makes the same calls in the same order.
    """
    places = [tuple(dict.fromkeys(_created_values(stage, context))) for stage in lowered.stages]
    if len(set(places)) == 1:
        return ()
    return tuple(dict.fromkeys(value for place in places for value in place))


def _created_values(stage: Stage, context: call.Context) -> Iterator[call.Shared]:
    for op in stage.ops:
        for step in op.calls(context):
            for value in call.values_of(step):
                yield from _inner_values(value, context)


def _inner_values(value: call.Value, context: call.Context) -> Iterator[call.Shared]:
    if isinstance(value, call.MeshOf):
        yield from _inner_values(call.mesh_source(value, context), context)
        return
    for part in call.parts_of(value):
        yield from _inner_values(part, context)
    match value:
        case call.Shared(value=call.FunctionCall(function=function)) if function in _CREATE:
            yield value
