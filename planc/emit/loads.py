"""The load section in the emitted Python: what is cast before all else, and a `load_weights`."""

from __future__ import annotations

from collections.abc import Iterator

from planc.emit.python import Group, lay, remark
from planc.emit.reach import IN
from planc.lowering.ops import Adapt, Load, Lowered

_ABOUT = {
    "slices": "Fills the model from a folder of safetensors; each rank reads its slices.",
    "rank0": "Fills the model from a folder of safetensors; rank 0 reads and sends.",
    "checkpoint": "Fills the model from a distributed checkpoint, whatever its ranks were.",
}


def prepared(op: Load) -> Iterator[str]:
    """The body of the stage."""
    if not op.meta and not op.dtype:
        yield from lay("del model  # it stays as it was built", IN)
    if op.meta:
        yield from lay("on_meta(model)", IN, note=remark(op.place))
    if op.dtype:
        arguments = ("model", f"torch.{op.dtype}", *([f'fp32=r"{op.pattern}"'] if op.fp32 else []))
        yield from lay(Group("keep_in(", arguments), IN, note=remark(op.place))


def filled(lowered: Lowered) -> list[str]:
    """A function that loads as the plan says, in a list; empty where it says nothing."""
    way = next((op.weights for op in lowered.ops if isinstance(op, Load) and op.weights), None)
    if way is None:
        return []
    if any(isinstance(op, Adapt) for op in lowered.ops):
        return [
            "def load_weights(model, folder, device):\n"
            f'    """{_ABOUT[way]}"""\n'
            '    raise NotImplementedError("only planc\'s Run.load fills a model with adapters")\n'
        ]
    return [
        "def load_weights(model, folder, device):\n"
        f'    """{_ABOUT[way]}"""\n'
        "    allocate(model, device)\n"
        f"    read_{way}(model, folder)\n"
    ]
