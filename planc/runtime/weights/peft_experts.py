"""Adapters of fused experts in peft's files: their names, their shapes, and merging.

peft wraps a module once for each of its weights, the last one outermost, and its keys do not name
the weight. A of all experts is one matrix [experts * rank, in], and B is [out, rank * experts].
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planc.ops.lora import BASE_LAYER, Adapt, factor_name
from planc.runtime.standalone import shards
from planc.runtime.standalone.lora_experts import sides
from planc.runtime.standalone.lora_init import adapter_layers, as_in_peft, of_experts
from planc.runtime.standalone.safetensors_files import StoredTensor

SWAPPED_BEFORE = (0, 19)
"""Earlier versions of peft take a weight [experts, out, in] for [experts, in, out]: A and B are in
each other's place, for all modules without `is_transposed`."""


class Pair(NamedTuple):
    """The factors of one weight of experts.

    Args:
        module: the plain name of the experts.
        names: the plain names of A and B.
        stored: their names in a file, without its prefix.
    """

    module: str
    names: tuple[str, str]
    stored: tuple[str, str]


def pairs_of(ops: Iterable[Adapt]) -> list[Pair]:
    pairs: list[Pair] = []
    for op in ops:
        for name in op.names():
            for outside, weight in enumerate(reversed(op.parameters)):
                wrapper = name + f".{BASE_LAYER}" * outside
                a, b = (f"{name}.{factor_name(weight, half)}" for half in "AB")
                pairs.append(Pair(name, (a, b), (f"{wrapper}.lora_A", f"{wrapper}.lora_B")))
    return pairs


def stored_shapes(tensors: dict[str, Tensor], pairs: Iterable[Pair]) -> None:
    """Gives whole factors among some tensors the shapes of peft's files."""
    for pair in pairs:
        if pair.names[0] in tensors:
            both = as_in_peft(*(tensors[name] for name in pair.names))
            tensors |= zip(pair.names, (t.contiguous() for t in both), strict=True)


def has_swapped_factors(
    pair: Pair,
    tensors: Mapping[str, Tensor],
    factors: tuple[StoredTensor, StoredTensor],
    transposed: bool,
    version: tuple[int, ...],
) -> bool | None:
    """Whether a file has A and B in each other's place; None where its shapes are wrong.

    Args:
        tensors: those of the model by plain name, A [experts, in, rank] and B [experts, out, rank].
        factors: those of the file.
        transposed: whether the weights of the module are [experts, in, out].
        version: of peft that wrote the file, which decides where `in` is `out`; () if unknown.
    """
    (experts, wide, rank), (_, high, _) = (tensors[name].shape for name in pair.names)
    shapes = [tuple(stored.shape) for stored in factors]
    now = shapes == [(experts * rank, wide), (high, rank * experts)]
    before = shapes == [(experts * rank, high), (wide, rank * experts)] and not transposed
    if not (now or before):
        return None
    return before and (not now or () < version < SWAPPED_BEFORE)


def read(
    pair: Pair,
    factors: tuple[StoredTensor, StoredTensor],
    swap: bool,
    tensors: Mapping[str, Tensor],
    orders: Mapping[str, shards.Order],
) -> None:
    """Fills this rank's shards of two factors from a file."""
    stored = []
    for entry in factors:
        value = torch.empty(entry.shape, dtype=tensors[pair.names[0]].dtype)
        entry.copy_to(value, [((0, size),) for size in entry.shape])
        stored.append(value)
    both = of_experts(stored[0], stored[1], tensors[pair.names[0]].shape[0])
    for name, value in zip(pair.names, both[::-1] if swap else both, strict=True):
        ranges = shards.slices_of(tensors[name], orders.get(name))
        shards.part_of(tensors[name]).copy_(shards.select_ranges(value, ranges))


def version_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The first two numbers of the version of peft that wrote a configuration; () if unknown."""
    match = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or ""))
    return tuple(map(int, match.groups())) if match else ()


def targets(model: nn.Module, ops: Iterable[Adapt]) -> list[str]:
    """peft's `target_parameters`: the last parts of names where no other module has them."""
    adapted = {f"{name}.{weight}" for op in ops for name in op.names() for weight in op.parameters}
    short = {".".join(name.split(".")[-3:]) for name in adapted}
    there = (n for n, _ in shards.named_tensors(model) if n not in adapted)
    alike = any(name.endswith(f".{end}") for name in there for end in short)
    return sorted(adapted if alike else short)


# Merging -----------------------------------------------------------------------------------------


def changes(
    model: nn.Module, change: Callable[[Any], Tensor]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name of a weight, its change by its adapter); a collective if the adapter is sharded.

    Args:
        change: of a layer of peft's.
    """
    for name, layer in adapter_layers(model).items():
        if "low_rank" not in layer.__dict__:
            yield f"{name}.weight", partial(change, layer)
            continue
        for weight, scale in layer.low_rank.items():
            yield f"{name}.{weight}", partial(_change, layer, weight, scale)


def _change(module: Any, weight: str, scale: float) -> Tensor:
    orders = getattr(module, "_rank_order", {})
    names = (factor_name(weight, half) for half in "AB")
    a, b = (shards.whole_of(module._parameters[n], orders.get(n)) for n in names)
    rows, columns = sides(module, a, b)
    return (rows @ columns.mT) * scale
