"""The values of adapters, also from meta, drawn as peft draws them, without it."""

import re
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from planc.runtime.standalone.shards import (
    is_adapter,
    part_of,
    plain_name,
    rank_orders,
    select_ranges,
    slices_of,
    whole_of,
)


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of a rank's stages that have adapters, by their names in the model:
    peft's, which wrap a layer, and fused experts with factors.
    """
    return {
        plain_name(path): module
        for path, module in model.named_modules()
        if (
            ("base_layer" in module._modules and hasattr(module, "lora_A"))
            or "low_rank" in module.__dict__
        )
        and any(True for _ in module.parameters())
    }


def halves_of(layer: nn.Module) -> dict[str, Tensor]:
    """The adapter parameters of a layer, by their names in it."""
    return {name: p for name, p in layer.named_parameters() if is_adapter(name)}


def unset_adapters(model: nn.Module, *, meta: bool = True) -> set[str]:
    """The names of adapter parameters on meta, or of those that are not."""
    return {
        f"{name}.{half}"
        for name, layer in adapter_layers(model).items()
        for half, parameter in halves_of(layer).items()
        if parameter.is_meta == meta
    }


def initialize_adapters(
    model: nn.Module,
    unset: set[str],
    pattern: str,
    *,
    rank: int,
    init: bool | str,
    seed: int,
) -> None:
    """Initializes the adapters of one `LoraConfig`, with equal values on every rank.

    Args:
        model: a model whose adapters are allocated.
        unset: the names of adapter parameters that get values.
        pattern: the configuration's `target_modules`.
        rank: its `r`.
        init: its `init_lora_weights`.
        seed: the seed of the values.
    """
    orders = rank_orders(model)
    with torch.no_grad():
        for name, layer in adapter_layers(model).items():
            if not re.fullmatch(pattern, name):
                continue
            # a seed for each layer: the ranks of a pipeline have some of them
            own_seed = (seed << 32) + crc32(name.encode())
            generator = torch.Generator().manual_seed(own_seed)
            halves = halves_of(layer)
            for half, value in first_values(layer, rank, init, generator):
                if (full := f"{name}.{half}") in unset:
                    ranges = slices_of(halves[half], orders.get(full))
                    part_of(halves[half]).copy_(select_ranges(value, ranges))


def first_values(
    layer: Any, rank: int, init: bool | str, generator: torch.Generator
) -> list[tuple[str, Tensor]]:
    """peft's initial values for a layer, drawn in the order of `update_layer`."""
    if "low_rank" in layer.__dict__:
        return [
            value
            for name in layer.low_rank
            for value in values_of_experts(layer, name, rank, init, generator)
        ]

    wide, high = layer.in_features, layer.out_features
    if layer.lora_embedding_A:
        (name,) = layer.lora_embedding_A
        a = torch.randn(rank, wide, generator=generator)
        b = torch.randn(high, rank, generator=generator)
        if init is not False:
            nn.init.zeros_(a)
            nn.init.normal_(b, generator=generator)
        return [(f"lora_embedding_A.{name}", a), (f"lora_embedding_B.{name}", b)]
    (name,) = layer.lora_A
    a, b = init_factors((rank, wide), (high, rank), rank, init, generator)
    return [(f"lora_A.{name}.weight", a), (f"lora_B.{name}.weight", b)]


def init_factors(
    first: tuple[int, int],
    second: tuple[int, int],
    rank: int,
    init: bool | str,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """A and B of two shapes, the weights of linear layers, as peft draws them."""

    def linear(*shape: int) -> Tensor:
        """The values that `nn.Linear` begins with."""
        return nn.init.kaiming_uniform_(
            torch.empty(shape), a=5**0.5, generator=generator
        )

    a, b = linear(*first), linear(*second)
    if init == "gaussian":
        nn.init.normal_(a, std=1 / rank, generator=generator)
    elif init is True:
        a = linear(*first)
    if init is not False:
        nn.init.zeros_(b)
    return a, b


def initialize_magnitudes(
    model: nn.Module, unset: set[str], pattern: str, *, init: bool | str, seed: int
) -> None:
    """Sets the magnitudes of DoRA of one `LoraConfig` to the norms of the rows, as peft
    does; where factors are random, to these times 0.5 to 1.5, so that no gradient says
    nothing. A collective where weights are sharded.

    Args:
        model: a model whose weights and factors have their values.
        unset: the names of adapter parameters that get values.
        pattern: the configuration's `target_modules`.
        init: its `init_lora_weights`.
        seed: the seed of the values.
    """
    orders = rank_orders(model)
    with torch.no_grad():
        for name, layer in adapter_layers(model).items():
            matches = re.fullmatch(pattern, name)
            for half, parameter in halves_of(layer).items() if matches else ():
                full = f"{name}.{half}"
                if "lora_magnitude_vector" not in half or full not in unset:
                    continue
                value = row_norms(layer)
                if init is False:
                    own_seed = (seed << 32) + crc32(full.encode())
                    generator = torch.Generator().manual_seed(own_seed)
                    factors = torch.rand(value.shape, generator=generator) + 0.5
                    value = value * factors.to(value)
                ranges = slices_of(parameter, orders.get(full))
                part_of(parameter).copy_(select_ranges(value, ranges))


def row_norms(layer: Any) -> Tensor:
    """The norms of the rows of a layer's weight and its adapter's change [out], whole;
    a collective where they are sharded.
    """
    rows = whole_weight(layer.base_layer) + whole_change(layer)
    norms: Tensor = torch.linalg.norm(rows.T if layer.fan_in_fan_out else rows, dim=1)
    return norms


def whole_change(layer: Any) -> Tensor:
    """The product of a layer's factors in the layout of its weight; a collective where
    they are sharded.

    The arithmetic is that of peft's `get_delta_weight`, in the adapter's dtype.
    """
    if layer.lora_embedding_A:
        (name,) = layer.lora_embedding_A
        halves = (layer.lora_embedding_A, layer.lora_embedding_B)
        a, b = (whole_of(half[name]) for half in halves)
    else:
        (name,) = layer.lora_A
        a, b = (whole_weight(half[name]) for half in (layer.lora_A, layer.lora_B))
    turned = layer.lora_embedding_A or getattr(layer, "fan_in_fan_out", False)
    change: Tensor = (b @ a).T if turned else b @ a
    return change * layer.scaling[name]


def whole_weight(module: Any) -> Tensor:
    """A module's weight in the model's order; a collective where it is sharded."""
    return whole_of(module.weight, getattr(module, "_rank_order", {}).get("weight"))


def values_of_experts(
    module: Any, name: str, rank: int, init: bool | str, generator: torch.Generator
) -> list[tuple[str, Tensor]]:
    """peft's values of the factors of one weight: A of all experts is one linear layer
    there, [experts * rank, in], and B is another, [out, rank * experts].
    """
    names = [f"{name}_lora_{half}" for half in "AB"]
    (experts, wide, _), (_, high, _) = (module._parameters[n].shape for n in names)
    rows = experts * rank
    a, b = init_factors((rows, wide), (high, rows), rank, init, generator)
    return [*zip(names, of_experts(a, b, experts), strict=True)]


def of_experts(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """peft's A [experts * rank, in] and B [out, rank * experts], as factors
    [experts, in, rank] and [experts, out, rank].
    """
    factor = a.reshape(experts, -1, a.shape[-1]).transpose(1, 2)
    return factor, b.reshape(len(b), -1, experts).permute(2, 0, 1)


def as_in_peft(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `of_experts`."""
    factor = a.transpose(1, 2).reshape(-1, a.shape[1])
    return factor, b.permute(1, 2, 0).reshape(b.shape[1], -1)
