"""The first values of adapters that were on meta: those that peft would have given them.

The emitted Python carries what it needs of this file as it stands, so it imports torch alone, and
its lines are of the length that formatters give without being told.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import re

import torch
from torch import nn

from planc.runtime.standalone.shards import part_of, plain_name, rank_orders, slices_of, taken


def adapter_layers(model):
    """peft's layers, by the names of the layers that they are around."""
    return {
        plain_name(path): module
        for path, module in model.named_modules()
        if "base_layer" in module._modules and hasattr(module, "lora_A")
    }


def halves_of(layer):
    """The parameters of peft's layer that are an adapter's, by their names there."""
    names = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
    own = layer.named_parameters()
    return {name: p for name, p in own if name.split(".")[0] in names}


def adapters_on_meta(model):
    """The names of adapters' parameters that have no memory yet."""
    return {
        f"{name}.{half}"
        for name, layer in adapter_layers(model).items()
        for half, parameter in halves_of(layer).items()
        if parameter.is_meta
    }


def begin_adapters(model, unset, pattern, *, rank, init, seed):
    """Gives the adapters of one `LoraConfig` their values; all ranks draw the same.

    Args:
        model: with memory for them by now.
        unset: the names of those without a value.
        pattern: the configuration's `target_modules`.
        rank: its `r`.
        init: its `init_lora_weights`.
        seed: of the values.
    """
    orders = rank_orders(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, layer in adapter_layers(model).items():
            if not re.fullmatch(pattern, name):
                continue
            own = halves_of(layer)
            for half, value in first_values(layer, rank, init):
                if (full := f"{name}.{half}") in unset:
                    ranges = slices_of(own[half], orders.get(full))
                    part_of(own[half]).copy_(taken(value, ranges))


def first_values(layer, rank, init):
    """What peft gives a layer, drawn in its order (`update_layer`)."""
    wide, high = layer.in_features, layer.out_features
    if layer.lora_embedding_A:
        (name,) = layer.lora_embedding_A
        a, b = torch.randn(rank, wide), torch.randn(high, rank)
        if init is not False:
            nn.init.zeros_(a)
            nn.init.normal_(b)
        return [(f"lora_embedding_A.{name}", a), (f"lora_embedding_B.{name}", b)]
    (name,) = layer.lora_A
    a = nn.Linear(wide, rank, bias=False).weight.detach()
    b = nn.Linear(rank, high, bias=False).weight.detach()
    if init == "gaussian":
        nn.init.normal_(a, std=1 / rank)
    elif init is True:
        nn.init.kaiming_uniform_(a, a=5**0.5)
    if init is not False:
        nn.init.zeros_(b)
    return [(f"lora_A.{name}.weight", a), (f"lora_B.{name}.weight", b)]
