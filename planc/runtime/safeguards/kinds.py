"""Each forward pass of a model of text and images or sound: data ranks pass the same kinds of it.

FSDP gathers a unit on all ranks when its module is called, and reduces gradients on all of them.
A rank whose batch has no image calls no vision tower: its next collective meets another one of the
other ranks, and NCCL waits for ever or mixes up their bytes.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from planc.diagnostic import PlanError, one_of
from planc.ops.fsdp import FullyShard
from planc.ops.lowered import Lowered
from planc.runtime.meshes import Meshes, rows_of
from planc.runtime.preconditions import stop
from planc.runtime.script_line import script_line

_TEXT = "input_ids"
_OTHERS = re.compile(r"pixel|image|video|audio|speech|input_(features|values)")
"""In the names of arguments for images and sound."""


Hook = Callable[[nn.Module, Any, Any], None]


def kinds_hook(model: nn.Module, lowered: Lowered, meshes: Meshes) -> Hook | None:
    """What compares, before each forward pass with gradients, which of these arguments are given.

    None for a model that takes no others than text, or never text alone, and where nothing trains
    or is a unit that text alone does not reach. It costs an all-gather of two numbers over each
    data axis, and a wait for the device.
    """
    arguments = inspect.signature(model.forward)
    names = [name for name in arguments.parameters if _OTHERS.search(name)]
    axes = [a.name for a in lowered.axes if a.name in lowered.data and a.size > 1]
    if not (names and axes and _TEXT in arguments.parameters):
        return None
    parts = [meshes.part(axis) for axis in axes]
    units = [
        model.get_submodule(name)
        for op in lowered.ops
        if isinstance(op, FullyShard)
        for members in op.members
        for name in members.names()
        if name
    ]
    needed: list[bool] = []  # after the first pass: modules are frozen after this is made

    def hook(model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if not needed:
            needed.append(_beside_text(model, units))
        if needed[0]:
            given = arguments.bind_partial(*args, **kwargs).arguments
            _compare(names, [given.get(name) is not None for name in names], parts)

    return hook


def _beside_text(model: nn.Module, units: Iterable[nn.Module]) -> bool:
    """Whether parameters outside the language model train, or are gathered apart from the root."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return False
    kind = type(config.get_text_config())
    inside = [m for m in model.modules() if isinstance(getattr(m, "config", None), kind)]
    if not inside or model in inside:
        return False
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inside += [head] if head is not None else []
    text = {id(p) for module in inside for p in module.parameters()}
    apart = {id(p) for unit in units for p in unit.parameters()}
    return any(
        id(p) not in text and (p.requires_grad or id(p) in apart) for p in model.parameters()
    )


def _compare(names: Sequence[str], given: Sequence[bool], parts: Sequence[DeviceMesh]) -> None:
    some = every = sum(1 << i for i, one in enumerate(given) if one)
    for part in parts:
        for other, common in rows_of(torch.tensor([some, every], device=part.device_type), part):
            some, every = some | other, every & common
    if some != every:
        raise _different([n for i, n in enumerate(names) if (some ^ every) >> i & 1], given, names)


def _different(what: list[str], given: Sequence[bool], names: Sequence[str]) -> PlanError:
    has = dict(zip(names, given, strict=True))
    kinds = one_of((f"`{name}`" for name in what), last="and")
    own = "does" if has[what[0]] else "does not"
    return stop(
        "PL479",
        f"some data ranks pass {kinds} and others do not; rank {distributed.get_rank()} {own}",
        *script_line("the inputs are passed here"),
        help="give each rank's batch an image or a sound, a blank one whose labels are ignored if "
        "it has none, or draw batches in which all ranks have some, or none has",
    )
