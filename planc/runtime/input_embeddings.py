"""Refuses `inputs_embeds` where the plan shards the output of the embedding along the sequence."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planc.ops.contract import output_layout
from planc.ops.lora import BASE_LAYER
from planc.ops.lowered import Lowered
from planc.ops.styles import Shard, Style
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.preconditions import stop


def guard(model: nn.Module, modules: Mapping[str, nn.Module], lowered: Lowered) -> None:
    """Watches the calls of a model: `inputs_embeds` skip the embedding, and with it the rule that
    shards its output, so that every rank would take the full sequence for its shard.
    """
    get = getattr(model, "get_input_embeddings", None)
    try:
        embedding = get() if callable(get) else None
    except NotImplementedError:  # a model without one, such as a vision tower
        return
    for op in lowered.ops:
        if isinstance(op, Parallelize) and _of_sequence(op.style):
            for name in op.modules.names():
                if modules.get(name.removesuffix(f".{BASE_LAYER}")) is embedding:
                    model.register_forward_pre_hook(partial(_refuse, name, op), with_kwargs=True)
                    return


def _of_sequence(style: Style) -> bool:
    layout = output_layout(style)
    return isinstance(layout, Shard) and layout.dim in (1, -2)


def _refuse(
    name: str, op: Parallelize, _model: nn.Module, _args: Any, kwargs: Mapping[str, Any]
) -> None:
    given = kwargs.get("inputs_embeds")
    if not isinstance(given, Tensor) or isinstance(given, DTensor):
        return
    [axis] = op.axes
    mesh = f'run.meshes["{axis}"]'
    raise stop(
        "PL476",
        f"`inputs_embeds` skip `{name}`, whose output the plan shards along the sequence "
        f"({op.place})",
        help="pass `input_ids`; or shard the embeddings as this rule does: "
        f"`DTensor.from_local(inputs_embeds, {mesh}, [Replicate()]).redistribute(placements="
        "[Shard(1)])`",
    )
