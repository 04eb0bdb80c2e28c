"""Linear layers of torchao, with fp8 or mxfp8 matmuls."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_linear import Float8Linear
from torchao.quantization import quantize_

from planc.compat.torchao import (
    FLOAT8_OPS_TABLE,
    MXFP8TrainingOpConfig,
    MXFP8TrainingRecipe,
)


def fp8_linear(
    layer: nn.Linear, recipe: str, device: str, *, gather: bool = False
) -> Float8Linear:
    """Returns a layer with the same parameters and fp8 matmuls.

    Args:
        recipe: `tensorwise` or `rowwise`.
        device: `cpu` emulates fp8 matmuls: it multiplies the rounded operands in the
            dtype of the parameters.
        gather: whether FSDP all-gathers the weight in fp8.
    """
    if device == "cpu":
        for op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            if not hasattr(FLOAT8_OPS_TABLE[op], "__wrapped__"):
                FLOAT8_OPS_TABLE[op] = in_float64(FLOAT8_OPS_TABLE[op])
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=device == "cpu",
        enable_fsdp_float8_all_gather=gather,
    )
    return Float8Linear.from_float(layer, config)


def in_float64(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps torchao's emulated matmul, which computes in float32, to compute in float64
    if the parameters are in float64.

    Otherwise rounding errors of float32, which depend on the order of sums, would
    decide to which of two fp8 values a number is rounded.
    """

    @functools.wraps(product)
    def multiply(op: Any, args: tuple[Any, ...], kwargs: Any = None) -> Tensor:
        *bias, one, two = args
        if one._orig_dtype != torch.float64:
            return product(op, args, kwargs)
        found: Tensor = op(*bias, *(t._data.double() / t._scale for t in (one, two)))
        return found

    return multiply


def mxfp8_linear(layer: nn.Linear, device: str) -> nn.Linear:
    """Returns the layer with mxfp8 matmuls: fp8 with one scale per 32 numbers.

    Args:
        device: `cpu` emulates the matmuls: it multiplies the rounded operands.
    """
    recipes = MXFP8TrainingRecipe
    recipe = recipes.MXFP8_EMULATED_RCEIL if device == "cpu" else recipes.MXFP8_RCEIL
    holder = nn.ModuleList([layer])
    config = MXFP8TrainingOpConfig.from_recipe(recipe)
    quantize_(holder, config, filter_fn=lambda module, _: module is layer)
    return holder[0]


def scale_before_forward(model: nn.Module) -> None:
    """Scales the weights that FSDP gathers in fp8, before each forward pass.

    The hook runs before FSDP's pre-forward hook, which may all-gather the first units.
    """

    def scale(module: nn.Module, *_: Any) -> None:
        precompute_float8_dynamic_scale_for_fsdp(module)

    model.register_forward_pre_hook(scale, prepend=True)
