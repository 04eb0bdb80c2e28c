"""A loss for models that compute none: how far their outputs are from fixed random tensors.

Encoders and embedding models return hidden states and take no labels. The mean of squares of these
alone would do little: behind a norm it is constant, and all gradients are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def with_output_loss(model: nn.Module) -> None:
    """Adds the loss of its outputs to a model, in place; `labels` are not passed on."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, labels: Any = None, **kwargs: Any) -> Any:
        return loss_and_output(plain(*args, **kwargs))

    model.forward = forward


def loss_and_output(output: Any) -> Any:
    """The loss of a model's output, with its first tensor of floating point numbers as logits."""
    outputs = [*tensors(output)]
    many = next((tensor for tensor in outputs if tensor.dim() > 1), None)
    return causal_output(output_loss(outputs) if outputs else None, many)


def causal_output(loss: Any, logits: Any) -> Any:
    """The outputs as a type that is a pytree for torch: FSDP's hooks look for tensors in it."""
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(loss=loss, logits=logits)


def output_loss(outputs: list[Tensor]) -> Tensor:
    """The sum, over tensors [rows, ...], of the mean squared distance from a random tensor [...],
    which is the same for all rows and in all runs.
    """
    losses = []
    for tensor in outputs:
        target = _scattered_numbers(tensor.shape[1:], tensor.device)
        losses.append((tensor.float() - target).square().mean())
    return torch.stack(losses).sum()


def _scattered_numbers(shape: torch.Size, device: torch.device) -> Tensor:
    """Numbers between -2 and 2 without a pattern, and without a draw, which would count as one of
    the model's.
    """
    places = torch.arange(shape.numel(), dtype=torch.float64, device=device).view(shape)
    return (4 * torch.frac(torch.sin(places * 12.9898 + 1) * 43758.5453).abs() - 2).float()


def tensors(output: Any) -> Iterator[Tensor]:
    """Yields the tensors of floating point numbers in a model's output, whole on every rank."""
    from torch.distributed.tensor import DTensor

    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.full_tensor() if isinstance(output, DTensor) else output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)
    elif hasattr(output, "__dict__"):
        yield from tensors(vars(output))
