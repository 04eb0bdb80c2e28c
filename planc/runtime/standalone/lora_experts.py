"""LoRA on the weights of fused experts: factors beside them, as grouped products."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planc.runtime.standalone.lora_init import initialize_adapters, unset_adapters
from planc.runtime.standalone.shards import is_adapter, plain_name
from planc.runtime.standalone.tensor_styles import with_views

OF_WEIGHT = (
    *("shape", "dtype", "device", "ndim", "size", "dim", "numel", "element_size"),
    *("stride", "data_ptr", "layout", "is_cuda", "is_meta", "requires_grad"),
)
"""Attributes that are equal for a weight and the weight with its change."""

PRODUCTS = frozenset(["matmul", "mm", "bmm", "__matmul__", "__rmatmul__"])
GROUPED = frozenset(["_grouped_mm", "grouped_mm", "grouped_mm_fallback"])


def adapt_experts(
    model: nn.Module,
    seed: int,
    *,
    pattern: str,
    parameters: Sequence[str],
    rank: int,
    scale: float,
    init: bool | str = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Adds factors to the weights of fused experts, and freezes all but adapters.

    Args:
        model: of which some modules are fused experts.
        seed: of the values, which are equal on every rank.
        pattern: a regular expression that the names of these modules match.
        parameters: their weights, in the order of the module.
        rank, scale: of the factors; their product is multiplied by `scale`.
        init: peft's `init_lora_weights`.
        dtype: of the factors, None for that of their weight.
    """
    before = unset_adapters(model, meta=False)
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if re.fullmatch(pattern, plain_name(name)):
            add_factors(module, parameters, rank, scale, dtype)
    new = unset_adapters(model, meta=False) - before
    initialize_adapters(model, new, pattern, rank=rank, init=init, seed=seed)


def add_factors(
    module: nn.Module,
    names: Sequence[str],
    rank: int,
    scale: float,
    dtype: torch.dtype | None = None,
) -> None:
    """Adds `NAME_lora_A` and `NAME_lora_B` to fused experts, which compute with them.

    A weight is [experts, x, y]; the factor of x is [experts, x, rank] and that of y is
    [experts, y, rank]. As in peft, A is the factor of x where the module's weights are
    transposed, [experts, in, out], else that of y.
    """
    turned = getattr(module, "is_transposed", False)
    for name in names:
        weight: Any = module._parameters[name]
        for half, dim in (("A", 1 if turned else 2), ("B", 2 if turned else 1)):
            shape = (weight.shape[0], weight.shape[dim], rank)
            value = weight.new_zeros(shape, dtype=dtype)
            module.register_parameter(f"{name}_lora_{half}", nn.Parameter(value))
    module.low_rank = dict.fromkeys(names, scale)
    with_views(module, {name: partial(adapted_weight, module, name) for name in names})


def adapted_weight(module: nn.Module, name: str, weight: Tensor) -> Any:
    """A weight of experts with what its factors change."""
    parameters: Any = module._parameters
    a, b = (parameters[f"{name}_lora_{half}"].to(weight.dtype) for half in "AB")
    rows, columns = sides(module, a, b)
    scales: Any = module.low_rank
    return LowRank(weight, rows, columns, scales[name])


def sides(module: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of x and of y of a weight [experts, x, y], of A and B."""
    return (a, b) if getattr(module, "is_transposed", False) else (b, a)


class LowRank:
    """A weight + scale * rows @ columns.mT, which is computed in no product.

    It stands for the weight in the code of a module. A matrix product with it is the
    one with the weight, and two with the factors. Where the code does anything else
    with the weight, the sum is made.

    Args:
        weight: [..., x, y].
        rows: [..., x, rank].
        columns: [..., y, rank].
        scale: a number.
    """

    def __init__(
        self, weight: Tensor, rows: Tensor, columns: Tensor, scale: float
    ) -> None:
        self.weight, self.rows, self.columns = weight, rows, columns
        self.scale = scale

    def dense(self) -> Tensor:
        """The sum."""
        return self.weight + self.scale * (self.rows @ self.columns.mT)

    def __getitem__(self, index: Any) -> Any:
        """Some of the experts."""
        if self.weight.ndim != 3 or not isinstance(index, int | slice | Tensor):
            return self.dense()[index]
        weight, rows, columns = self.weight, self.rows, self.columns
        return LowRank(weight[index], rows[index], columns[index], self.scale)

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def mT(self) -> "LowRank":
        return LowRank(self.weight.mT, self.columns, self.rows, self.scale)

    def transpose(self, first: int, second: int) -> Any:
        dims = self.weight.ndim
        if sorted((first % dims, second % dims)) == [dims - 2, dims - 1]:
            return self.mT
        return self.dense().transpose(first, second)

    def __matmul__(self, other: Tensor) -> Tensor:
        return torch.matmul(self, other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight if name in OF_WEIGHT else self.dense(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        first, second = (*args, None, None)[:2]
        if isinstance(second, cls) and not isinstance(first, cls):
            if name == "linear":
                out = function(first, second.weight, *args[2:], **kwargs)
                return out + second.mT.after(first, torch.matmul)
            if name in PRODUCTS | GROUPED:
                other = second.pad_rank() if name in GROUPED else second
                out = function(first, second.weight, *args[2:], **kwargs)
                return out + other.after(first, function, *args[2:], **kwargs)
        elif isinstance(first, cls) and name in PRODUCTS:
            inner = function(first.columns.mT, second) * first.scale
            return function(first.weight, second) + function(first.rows, inner)
        args = [a.dense() if isinstance(a, cls) else a for a in args]
        kwargs = {n: a.dense() if isinstance(a, cls) else a for n, a in kwargs.items()}
        return function(*args, **kwargs)

    def after(self, value: Tensor, product: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The product of a value with the factors, by a function."""
        inner = product(value, self.rows, *args, **kwargs) * self.scale
        out: Tensor = product(inner, self.columns.mT, *args, **kwargs)
        return out

    def pad_rank(self) -> "LowRank":
        """With zeros, so that a row of a factor is a multiple of 16 bytes, as grouped
        products require.
        """
        more = -self.rows.shape[-1] % (16 // self.rows.element_size())
        if not more:
            return self
        rows = functional.pad(self.rows, (0, more))
        columns = functional.pad(self.columns, (0, more))
        return LowRank(self.weight, rows, columns, self.scale)
