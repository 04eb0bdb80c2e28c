"""Copies of a user's own module, with weights of their own, to be run in a proof."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planc.model.module_table import already_parallel


def copies_of(module: nn.Module) -> Callable[[], nn.Module]:
    """A factory of copies of a module on the CPU; the module itself is not touched.

    Parameters on meta get random values, about as large as torch's own first ones.

    Raises:
        ValueError: the module is parallel already, or has a buffer on meta, whose values only its
            own code knows.
    """
    if reason := already_parallel(module):
        raise ValueError(f"it is parallel already: {reason}")
    lost = next((name for name, buffer in module.named_buffers() if buffer.is_meta), None)
    if lost is not None:
        raise ValueError(
            f"its buffer {lost} is on the meta device, and only its own code computes the values: "
            "build it on the CPU"
        )

    def make() -> nn.Module:
        made = copy.deepcopy(module)
        if torch.get_default_device().type == "meta":  # to be looked at, and not to be run
            return made
        known: dict[int, Any] = {}
        for inner in made.modules():
            for name, parameter in inner._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if id(parameter) not in known:
                        known[id(parameter)] = _filled(parameter)
                    inner._parameters[name] = known[id(parameter)]
        return made.to("cpu")

    return make


def _filled(parameter: Any) -> Any:
    wide = parameter.shape[-1] if parameter.dim() > 1 else 1
    values = torch.randn(parameter.shape) * wide**-0.5
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
