"""The process groups that only some pipeline ranks use."""

from collections.abc import Iterator

from planc.ops import call
from planc.ops.lowered import Lowered, Stage

_CREATE = ("._flatten", "standalone.expert_parallel:mesh_of_experts")


def uneven_groups(lowered: Lowered, context: call.Context) -> tuple[call.Shared, ...]:
    """The calls that create process groups, if they differ between pipeline ranks; else empty.

    Every rank must take part in the creation of each group, in the same order. So these calls come
    before all operations.
    """
    values_by_rank = [
        tuple(dict.fromkeys(_created_values(stage, context))) for stage in lowered.stages
    ]
    if len(set(values_by_rank)) == 1:
        return ()
    return tuple(dict.fromkeys(value for values in values_by_rank for value in values))


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
