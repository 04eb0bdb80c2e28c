"""Models whose outputs depend on the length to which rows are padded.

One process pads all rows of a step to one length. Data ranks pad their own rows, so that such a
model computes something else on a rank whose longest row is shorter.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planc.ops.lowered import Lowered
from planc.runtime.gradients import most
from planc.runtime.meshes import Meshes
from planc.runtime.preconditions import stop
from planc.runtime.script_line import script_line

Hook = Callable[[nn.Module, Any, Any], None]


def padding_dependence(config: Any) -> str:
    """Describes the part of a transformers model that depends on the padded length; empty if none
    is known.
    """
    if getattr(config, "feat_extract_norm", None) == "group":
        return "its group norm takes the mean over all samples of a row (`feat_extract_norm`)"
    if getattr(config, "attention_type", None) == "block_sparse":
        return "the blocks of its attention are chosen by the length of a row (`attention_type`)"
    return ""


def lengths_hook(model: nn.Module, lowered: Lowered, meshes: Meshes) -> Hook | None:
    """Returns a hook that compares the padded lengths of data ranks before each forward pass with
    gradients; None for a model that does not depend on them. It costs an all-reduce of two numbers
    over each data axis, and a wait for the device.
    """
    reason = padding_dependence(getattr(model, "config", None))
    if not reason or not lowered.wide_data:
        return None
    parts = [meshes.part(axis) for axis in lowered.wide_data]

    def hook(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        length = next(_lengths((*args, *kwargs.values())), 0)
        numbers = torch.tensor([length, -length])
        for part in parts:
            numbers = most(numbers, part)
        longest, shortest = numbers.abs().tolist()
        if longest != shortest:
            raise stop(
                "PL424",
                f"data ranks pass rows of {shortest} to {longest} tokens or samples, and the "
                f"output of {type(model).__name__} depends on the padded length: {reason}",
                *script_line("the inputs are passed here"),
                help="pad the rows of all ranks to one length, such as the longest that your data "
                "set has",
            )

    return hook


def _lengths(values: Iterator[Any] | tuple[Any, ...]) -> Iterator[int]:
    yield from (v.shape[1] for v in values if isinstance(v, Tensor) and v.dim() > 1)
