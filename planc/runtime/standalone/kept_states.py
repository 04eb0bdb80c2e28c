"""States of an optimizer in 8 bits, on the host, or both: a step reads their values and
writes new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from planc.runtime.standalone.shards import part_of

KEEPING = ("state", "block", "host")
"""The settings of a group for its states: their dtype, the block of those in 8 bits,
the device."""


def plan_settings(terms: dict[str, Any], kind: Any) -> tuple[float, float, str]:
    """The settings of a group in a plan: the factors of `lr` and `weight_decay`, and a
    text of all others, with the class that steps it.
    """
    rest = sorted((k, v) for k, v in terms.items() if k not in ("lr", "weight_decay"))
    return terms["lr"], terms["weight_decay"], repr((rest, kind))


def resume_group(planned: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The values of a group after a load: those of the checkpoint, or, where another
    plan saved it, what the plan says, with the rates that a schedule had come to.
    """
    same = planned["algorithm"] == saved.get("algorithm", planned["algorithm"])
    was = saved.get("planned", planned["planned"] if same else None)
    if was == planned["planned"]:
        return {**planned, **{k: v for k, v in saved.items() if k not in KEEPING}}
    rates = {"lr": 0, "initial_lr": 0, "weight_decay": 1}
    group = dict(planned)
    for key, factor in rates.items():
        if was is not None and key in saved and was[factor]:
            group[key] = saved[key] / was[factor] * planned["planned"][factor]
    return group


def dynamic_codes(signed: bool) -> Tensor:
    """The 256 values that codes of a dynamic exponent and fraction have, in order.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022; the
    numbers are those of `create_dynamic_map` in bitsandbytes and torchao.

    Args:
        signed: from -0.993 to 1, or from 0.
    """
    codes = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        middles = 10.0 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)
        codes += [middles, -middles] if signed else [middles]
    return torch.cat(codes).sort().values


def eight_bits(values: Tensor, block: int, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest code of each value, and the scale of each block of a row.

    A scale is the value that is farthest from zero, with its sign: that is code 1, so
    that values which were read give the same codes and scales again.

    Args:
        values: [..., n]; blocks are of the last dim, and the last one may be short.
        block: how many values have a scale.
        codes: `dynamic_codes`, on the device of the values.

    Returns:
        codes [..., blocks, block] and scales [..., blocks, 1] in float32.
    """
    rows = pad(values.float(), (0, -values.shape[-1] % block))
    rows = rows.unflatten(-1, (-1, block))
    high, low = rows.amax(-1, keepdim=True), rows.amin(-1, keepdim=True)
    scales = torch.where(high >= -low, high, low)
    between = (codes[1:] + codes[:-1]) / 2
    nearest = torch.bucketize(rows / scales, between, out_int32=True)
    return nearest.to(torch.uint8), scales


def from_eight_bits(
    numbers: Tensor, scales: Tensor, width: int, codes: Tensor
) -> Tensor:
    """The values [..., width] of codes and scales."""
    return (codes[numbers.int()] * scales).flatten(-2)[..., :width]


def to_host(values: Tensor) -> Tensor:
    """A copy in the host's memory, pinned where a device copies from it."""
    pinned = torch.cuda.is_available()
    return torch.empty_like(values, device="cpu", pin_memory=pinned).copy_(values)


def to_device(values: Tensor, like: Tensor) -> Tensor:
    """The same values on the device of a tensor."""
    return values.to(like.device)


class KeptState:
    """A state of a shard, as its group keeps it.

    Args:
        values: with the layout of their parameter, or whole on each rank.
        block: of values in 8 bits; 0 for values as they are.
        signed: whether they may be below zero.
        host: whether they are in the host's memory.
    """

    def __init__(self, values: Tensor, block: int, *, signed: bool, host: bool) -> None:
        shard = part_of(values)
        self.sharded, self.width = isinstance(values, DTensor), shard.shape[-1:]
        self.block, self.signed, self.host = block, signed, host
        self.codes = dynamic_codes(signed)
        parts = self._parts(shard)
        self.parts = [to_host(p) for p in parts] if host else [*parts]

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        if not self.block:
            return (values,)
        self.codes = self.codes.to(values.device)
        return eight_bits(values, self.block, self.codes)

    def read_as(self, like: Tensor) -> Tensor:
        """The values in the dtype and on the device of a tensor; this memory, if it is
        there in that dtype.
        """
        parts = [to_device(p, like) if self.host else p for p in self.parts]
        if self.block:
            self.codes = self.codes.to(parts[0].device)
            numbers, scales = parts
            parts = [from_eight_bits(numbers, scales, self.width[0], self.codes)]
        return parts[0].to(like)

    def copy_(self, values: Tensor) -> None:
        """Takes new values, of any device."""
        for part, new in zip(self.parts, self._parts(values), strict=True):
            part.copy_(new)

    def values(self, parameter: Tensor) -> Tensor:
        """The values with the layout that they came in, on the host."""
        like = torch.empty(0, dtype=self.parts[-1].dtype)
        if not self.sharded:
            return self.read_as(like)
        values = torch.empty_like(parameter.detach(), dtype=like.dtype, device="cpu")
        part_of(values).copy_(self.read_as(like))
        return values


def create_state(
    values: Tensor, parameter: Tensor, name: str, group: Any
) -> Tensor | KeptState:
    """A state as its group keeps it: rows of at least a block are in 8 bits.

    Args:
        values: of the state.
        parameter: that it belongs to.
        name: of the state.
        group: of the optimizer; without `block` and `host` where these are not said.
    """
    block, host = group.get("block", 0), group.get("host", False)
    if parameter.ndim < 2 or parameter.shape[-1] < block:
        block = 0
    values = values.to(parameter.device)
    if not (block or host):
        return values
    if not block:
        values = values.to(group["state"] or parameter.dtype)
    return KeptState(values, block, signed=name != "exp_avg_sq", host=host)


def state_values(state: Any, parameter: Tensor) -> Any:
    """A state as numbers and tensors, which no longer say how it is kept."""
    return state.values(parameter) if isinstance(state, KeptState) else state


def state_like(parameter: Tensor, state: Any, name: str, group: Any) -> Any:
    """A state of the layout of a parameter, zero before the first step: this rank's
    part of it, or what is read and written like that.
    """
    dtype = group["state"] or parameter.dtype
    if name not in state:
        zeros = torch.zeros_like(parameter, dtype=dtype)
        state[name] = create_state(zeros, parameter, name, group)
    value = state[name]
    if isinstance(value, KeptState):
        return value
    if value.dtype != dtype:  # that of a checkpoint of another plan
        state[name] = value.to(dtype)
    return part_of(state[name])


def read_as(states: Sequence[Any], like: Tensor) -> list[Tensor]:
    """States in the dtype and on the device of a step; the same tensors if they are."""
    return [
        state.read_as(like) if isinstance(state, KeptState) else state.to(like)
        for state in states
    ]


def written_back(states: Sequence[Any], computed: Sequence[Tensor]) -> None:
    """Gives states what a step computed from copies of them."""
    for state, value in zip(states, computed, strict=True):
        if state is not value:
            state.copy_(value)
