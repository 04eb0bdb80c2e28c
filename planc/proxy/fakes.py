"""Fake tensors: inputs for a model, and operators that torch cannot run on them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from planc.compat.fakes import FakeTensor

_TOKENS = ("input_ids", "decoder_input_ids", "labels", "attention_mask")


def on_fakes(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operator; grouped products of fake tensors are known to torch in bfloat16 alone."""
    first = args[0] if args else None
    if func is not torch.ops.aten._grouped_mm.default or not isinstance(first, FakeTensor):
        return func(*args, **kwargs)
    half = (a.bfloat16() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    result = func(*half, **{name: v for name, v in kwargs.items() if name != "out_dtype"})
    return result.to(kwargs.get("out_dtype") or first.dtype)


def fake_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a model, inside a `FakeTensorMode`: numbers and token ids without values. Others
    keep theirs, such as sizes of images, which models read.
    """
    return {name: _without_values(name, value) for name, value in inputs.items()}


def _without_values(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or name in _TOKENS):
        return value
    return torch.empty(value.shape, dtype=value.dtype)
