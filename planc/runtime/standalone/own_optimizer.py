"""Optimizers of a plan's own: a class steps the parameters of a group."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from planc.runtime.standalone.shards import redistribute

Own = tuple[type[Optimizer], dict[str, Any]]
"""A class, and its arguments beside `lr` and `weight_decay`."""


class OwnSteps:
    """Parameters that an instance of a class steps, with the values of their group.

    The group and the states are those of the plan's optimizer: what a scheduler sets
    there is what the instance reads, and what it keeps there is saved.
    """

    def __init__(self, user_class: Own, group: dict[str, Any]) -> None:
        kind, arguments = user_class
        self.parameters: list[Tensor] = group["params"]
        rate, decay = group["lr"], group["weight_decay"]
        self.inner = instance(kind, self.parameters, rate, decay, arguments)
        for name, value in self.inner.param_groups[0].items():
            group.setdefault(name, value)

    def step(self, group: dict[str, Any], state: Any) -> None:
        """One step of the parameters that have a gradient; every rank calls it."""
        for p in self.parameters:
            gradient: Any = p.grad  # a partial one is summed over the ranks
            if isinstance(gradient, DTensor) and isinstance(p, DTensor):
                p.grad = redistribute(gradient, p.placements)
        mine = {p: state[p] for p in self.parameters if p in state}
        self.inner.param_groups = [group]
        self.inner.state = defaultdict(dict, mine)
        self.inner.step()
        state.update(self.inner.state)


def instance(
    kind: type[Optimizer],
    parameters: Sequence[Tensor],
    lr: float,
    weight_decay: float,
    arguments: dict[str, Any],
) -> Optimizer:
    """An instance of a class; one without a weight decay is not told that it is zero.

    Raises:
        TypeError: the class has no such arguments.
    """
    decay = {"weight_decay": weight_decay}
    known = inspect.signature(kind).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if not weight_decay and "weight_decay" not in known and not any_name:
        decay = {}
    return kind(parameters, lr=lr, **decay, **arguments)
