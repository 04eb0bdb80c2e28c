"""Frozen parameters and adapters of the model whose layers `kept_tensors` counts.

Autograd keeps the input of a layer for the gradient of its weight: not where that is frozen, but
for the factor A of an adapter. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planc.model.facts import Facts, Module
from planc.ops.lora import HALVES


def train_as(facts: Facts, model: nn.Module, named: Mapping[str, tuple[str, ...]]) -> list[Tensor]:
    """Freezes what is frozen, and adds to layers what their adapters compute.

    Args:
        facts: the real model, with the adapters of the plan.
        model: its small one, without them.
        named: for layers of the small model the names of the real ones like it.

    Returns:
        The weights of the adapters.
    """
    weights: list[Tensor] = []
    for name, module in model.named_modules():
        try:
            known = facts.at(_real(name, named)).module
        except KeyError:  # a buffer's holder, or a list that the facts have no entries of
            continue
        trains = {p.name: p.trainable for p in known.parameters}
        for own, parameter in module.named_parameters(recurse=False):
            parameter.requires_grad_(trains.get(own, True))
            if not trains.get(own, True) and isinstance(module, nn.Embedding):
                module.register_forward_hook(_as_input)
        if halves := _halves(known, next(module.parameters(recurse=False), None)):
            weights += halves
            module.register_forward_hook(partial(_add, *halves))
    return weights


def _real(name: str, named: Mapping[str, tuple[str, ...]]) -> str:
    """The torch name in the real model of a module of the small one."""
    for small, like in named.items():
        if name == small or name.startswith(f"{small}."):
            return like[0] + name[len(small) :]
    return name


def _halves(known: Module, weight: Tensor | None) -> list[Tensor]:
    linear = HALVES[:2]
    own = {c.name: c.module.children[0].module for c in known.children if c.name in linear}
    if weight is None or not own:
        return []
    shapes = (own[name].parameters[0].shape for name in linear)
    return [torch.empty(shape, dtype=weight.dtype, requires_grad=True) for shape in shapes]


def _as_input(_module: nn.Module, _args: Any, output: Tensor) -> None:
    """The input of the first block has a gradient, as that of the blocks that it stands for."""
    if not output.requires_grad:
        output.requires_grad_()


def _add(first: Tensor, second: Tensor, _module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + functional.linear(functional.linear(args[0], first), second)
