"""Linear layers of torchao, whose matrix products are of numbers in 8 bits."""

import dataclasses
from typing import Any

from torch import nn
from torchao.float8 import Float8LinearConfig, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.config import (
    MXFP8TrainingOpConfig,
    MXFP8TrainingRecipe,
)
from torchao.quantization import quantize_


def fp8_linear(
    layer: nn.Linear, recipe: str, device: str, *, gather: bool = False
) -> Float8Linear:
    """A layer with the same parameters, whose products are of numbers in fp8.

    Args:
        recipe: `tensorwise` or `rowwise`.
        device: a `cpu` has no such products: it multiplies the rounded numbers in the
            dtype of the parameters.
        gather: whether FSDP all-gathers the weight in fp8.
    """
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=device == "cpu",
        enable_fsdp_float8_all_gather=gather,
    )
    return Float8Linear.from_float(layer, config)


def mxfp8_linear(layer: nn.Linear, device: str) -> nn.Linear:
    """The layer, whose products are of numbers in fp8 with a scale for 32 of them.

    Args:
        device: a `cpu` has no such products: it multiplies the rounded numbers.
    """
    recipes = MXFP8TrainingRecipe
    recipe = recipes.MXFP8_EMULATED_RCEIL if device == "cpu" else recipes.MXFP8_RCEIL
    holder = nn.ModuleList([layer])
    config = MXFP8TrainingOpConfig.from_recipe(recipe)
    quantize_(holder, config, filter_fn=lambda module, _: module is layer)
    return holder[0]


def scale_before_forward(model: nn.Module) -> None:
    """Scales the weights that FSDP gathers in fp8, before each forward pass.

    In front of FSDP's own hook, which may gather the first units.
    """

    def scale(module: nn.Module, *_: Any) -> None:
        precompute_float8_dynamic_scale_for_fsdp(module)

    model.register_forward_pre_hook(scale, prepend=True)
