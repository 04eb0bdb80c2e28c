"""The load section in emitted Python: the function `load_weights`."""

from collections.abc import Iterator

from planc.emit.python.layout import Bracketed, lay, literal
from planc.emit.python.module_loops import IN
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered

_ONE_FORM = "A checkpoint in another format, such as one tensor per expert, is an error.\n    "
_ABOUT = {
    "slices": "Loads a folder of safetensors; each rank reads its slices.",
    "rank0": "Loads a folder of safetensors; rank 0 reads and sends.",
    "checkpoint": "Loads a distributed checkpoint, saved on any number of ranks.",
}
_CHECKED = {
    "slices": ("checked_files(", "model", "folder"),
    "rank0": ("checked_files(", "model", "folder", "distributed.get_rank() == 0"),
    "checkpoint": ("checked_checkpoint(", "model", "folder"),
}
_GIVEN = {"slices": "", "rank0": ", device", "checkpoint": ", folder"}


def load_function(lowered: Lowered) -> list[str]:
    """The function that loads weights, in a list; empty where the plan does not set `weights`."""
    load, way = lowered.load, lowered.load.weights
    if way is None:
        return []
    lines = [
        "def load_weights(model, folder, device):",
        f'    """{_ABOUT[way]}',
        "",
        f'    {_ONE_FORM}"""',
    ]
    adapts = lowered.adapters
    if adapts:
        lines.append("    unset = unset_adapters(model)")
    function, *given = _CHECKED[way]
    if load.dequantize and way != "checkpoint":
        how = f'"{load.dequantize}", {load.block}'
        given.append(f"plain=lambda *given: dequantize(*given, {how})")
    lines += lay(Bracketed(f"found, values = {function}", (*given,)), IN)
    lines.append("    materialize(model, values, device)")
    for op in adapts:
        lines += _init_adapters(op)
    lines.append(f"    read_{way}(model, found{_GIVEN[way]})")
    for op in (op for op in adapts if op.dora):
        named = ("model", "unset - found.keys()", f'r"{op.pattern}"')
        values = (f"init={literal(op.initial)}", f"seed={op.seed}")
        lines += lay(Bracketed("initialize_magnitudes(", (*named, *values)), IN)
    return ["\n".join(lines) + "\n"]


def _init_adapters(op: Adapt) -> Iterator[str]:
    """The call that initializes adapters, whose values are in no file of the model."""
    where = ("model", "unset", f'r"{op.pattern}"')
    how = (f"rank={op.rank}", f"init={literal(op.initial)}", f"seed={op.seed}")
    yield from lay(Bracketed("initialize_adapters(", (*where, *how)), IN)
