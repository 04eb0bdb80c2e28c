"""Adafactor on shards: means of rows and columns are summed over the ranks that split
a parameter, and kept whole on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from planc.runtime.standalone.kept_states import KeptState, create_state, read_as
from planc.runtime.standalone.shards import Block, gradient_part, part_of


class Factored:
    """Parameters with two all-reduces a step: of squares of gradients and parameters,
    and of squares of updates.

    It computes what `torch.optim.Adafactor` does; source: Shazeer and Stern, 2018.

    Args:
        parameters: that the same ranks hold.
        blocks: those of this rank's shard of each.
        group: of the ranks; None for one rank.
        device: on which they exchange.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        blocks: list[list[Block]],
        group: Any,
        device: str | None,
    ) -> None:
        self.parameters, self.blocks = parameters, blocks
        self.group, self.device = group, device

    def step(self, group: Any, state: Any) -> None:
        """One step; every rank calls it."""
        pairs = [*zip(self.parameters, self.blocks, strict=True)]
        gradients = [
            torch.zeros_like(part_of(p)) if p.grad is None else gradient_part(p)
            for p, _ in pairs
        ]
        sums = [
            squares(p, gradient, blocks)
            for (p, blocks), gradient in zip(pairs, gradients, strict=True)
        ]
        totals = iter(
            self.all_reduce([tensor for tensors in sums for tensor in tensors])
        )
        updates: list[tuple[Tensor, Tensor, Tensor]] = []
        for (p, blocks), gradient in zip(pairs, gradients, strict=True):
            seen, norm, *means = [next(totals) for _ in range(4 if p.ndim > 1 else 2)]
            if p.grad is None and not seen.item():  # no rank has one
                continue
            moment = second_moment(
                p, gradient, blocks, means, group=group, state=state[p]
            )
            rate = min(group["lr"], float(state[p]["step"]) ** -0.5)
            size = (norm / p.numel()).sqrt().clamp(min=group["eps2"]) * rate
            least = epsilon(p, group) ** 2
            update = moment.clamp_(min=least).rsqrt_().mul_(gradient)
            updates.append((p, update, size))
        norms = self.all_reduce([update.square().sum() for _, update, _ in updates])
        for (p, update, size), norm in zip(updates, norms, strict=True):
            clip = ((norm / p.numel()).sqrt() / group["d"]).clamp(min=1.0)
            shard = part_of(p)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.sub_(update.mul_(size / clip))

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over the ranks, by one collective."""
        if self.group is None or not tensors:
            return [*tensors]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self.device)
        distributed.all_reduce(flat, group=self.group)
        parts = flat.to(tensors[0].device).split([tensor.numel() for tensor in tensors])
        return [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)]


def squares(parameter: Tensor, gradient: Tensor, blocks: list[Block]) -> list[Tensor]:
    """This rank's part of: whether there is a gradient, the square of the parameter,
    and, of a matrix, those of the gradient's rows and columns.
    """
    shard = part_of(parameter)
    wide = torch.promote_types(shard.dtype, torch.float32)
    seen = shard.new_tensor(float(parameter.grad is not None), dtype=wide)
    sums = [seen, shard.to(wide).square().sum()]
    if parameter.ndim > 1:
        *before, height, width = parameter.shape
        rows = shard.new_zeros((*before, height), dtype=wide)
        columns = shard.new_zeros((*before, width), dtype=wide)
        for inner, outer in blocks:
            square = gradient[inner].to(wide).square()
            rows[outer[:-1]] += square.sum(-1)
            columns[(*outer[:-2], outer[-1])] += square.sum(-2)
        sums += [rows, columns]
    return sums


def second_moment(
    parameter: Tensor,
    gradient: Tensor,
    blocks: list[Block],
    sums: list[Tensor],
    *,
    group: Any,
    state: dict[str, Any],
) -> Tensor:
    """Updates the states with a gradient; returns the second moment of this rank's
    shard.
    """
    step = state.setdefault("step", torch.tensor(0.0))
    step += 1
    share = float(step) ** group["beta2_decay"]
    terms = {"share": share, "group": group, "state": state}
    if parameter.ndim == 1:
        return update_average("variance", gradient.square(), parameter, **terms)
    *_, height, width = parameter.shape
    rows, columns = (sums[0] / width).unsqueeze(-1), (sums[1] / height).unsqueeze(-2)
    rows = update_average("row_var", rows, parameter, **terms)
    columns = update_average("col_var", columns, parameter, **terms)
    rows = rows / rows.mean(dim=-2, keepdim=True).clamp(min=epsilon(parameter, group))
    moment = torch.empty_like(gradient)
    for inner, outer in blocks:
        *before, row, column = outer
        product = rows[(*before, row)] * columns[(*before, slice(None), column)]
        moment[inner] = product.to(moment.dtype)
    return moment


def update_average(
    name: str,
    value: Tensor,
    parameter: Tensor,
    *,
    share: float,
    group: Any,
    state: dict[str, Any],
) -> Tensor:
    """The moving average that a state keeps, after it has taken a value."""
    dtype = group["state"] or parameter.dtype
    if name not in state:
        like = parameter if name == "variance" else value
        zeros = torch.zeros_like(like, dtype=dtype)
        state[name] = create_state(zeros, parameter, name, group)
    average = state[name]
    average = average if isinstance(average, KeptState) else part_of(average)
    moved = read_as([average], value)[0].lerp(value, share)
    average.copy_(moved)
    return moved


def epsilon(parameter: Tensor, group: Any) -> float:
    """The least value of a mean, `eps1`; by default the precision of the parameter."""
    given: float | None = group["eps1"]
    return torch.finfo(parameter.dtype).eps if given is None else given
