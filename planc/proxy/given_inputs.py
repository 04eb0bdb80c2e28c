"""The inputs and the loss of a model, stated by the user or by the model's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from planc.model.sources.huggingface import reason
from planc.proxy.input_search import BatchShape
from planc.proxy.output_loss import loss_and_output, tensors
from planc.proxy.refused_inputs import of_the_machine
from planc.proxy.sample_inputs import Inputs

INPUTS, LOSS = "planc_inputs", "planc_loss"
"""The methods by which a model itself says it."""
MakeInputs = Callable[[int, int], Mapping[str, Any]]
"""Maps the number of rows and a seed to the arguments of forward by name."""
Loss = Callable[[Any, Mapping[str, Any]], Tensor]
"""Maps the output of forward and its arguments to a loss: a mean over rows."""

_SIDES = ("img_size", "image_size", "input_size")
_TRIED = (32, 64, 224)
_SAMPLES = 2048


@dataclass(frozen=True, kw_only=True)
class GivenInputs:
    """The inputs and the loss of a model.

    Args:
        make: makes the inputs of a pass.
        loss: of an output; None for the loss that the model returns, else that of its output.
    """

    make: MakeInputs
    loss: Loss | None = None

    def rows(self, shape: BatchShape) -> Inputs:
        """The inputs with one entry for each row, which data ranks divide."""
        inputs = self.make(shape.rows, shape.seed)
        return {name: value for name, value in inputs.items() if name not in self.constant_inputs}

    @cached_property
    def constant_inputs(self) -> Inputs:
        """All other inputs, which are the same in every pass."""
        two, three = self.make(2, 0), self.make(3, 0)
        return {n: v for n, v in two.items() if not (_in_rows(v, 2) and _in_rows(three.get(n), 3))}

    def output(self, output: Any, inputs: Mapping[str, Any]) -> Any:
        """The loss and the first tensor of an output.

        Raises:
            ValueError: what the user says of the loss cannot be used.
        """
        given = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if self.loss is not None:
            given = _checked_loss(self.loss, output, inputs)
        result = loss_and_output(output)
        if given is None and any(t.dim() == 0 for t in tensors(output)):
            given = next(t for t in tensors(output) if t.dim() == 0)
        result.loss = result.loss if given is None else given
        return result


def _checked_loss(loss: Loss, output: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The loss that the user's function computes; ValueError if the function fails or it is not a
    scalar with a gradient.
    """
    try:
        value = loss(output, inputs)
    except Exception as error:
        raise ValueError(f"`{LOSS}(output, inputs)` fails: {reason(error)}") from error
    if not isinstance(value, Tensor):
        raise ValueError(f"`{LOSS}` gives a {type(value).__name__}, and not a tensor")
    if value.dim():
        raise ValueError(f"`{LOSS}` gives {list(value.shape)} numbers, and not one, such as a mean")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(f"`{LOSS}` gives a number without a gradient")
    return value


def given_inputs(inputs: Any, loss: Loss | None, module: nn.Module) -> GivenInputs | None:
    """The inputs and the loss that the user passes, else those of the model's methods; None for
    neither.

    Args:
        inputs: `(rows, seed)` to arguments by name, or an example of these.
        loss: as of `GivenInputs`.
        module: its methods `planc_inputs` and `planc_loss` say what is not passed.

    Raises:
        ValueError: what is said of the inputs cannot be used.
    """
    inputs = getattr(module, INPUTS, None) if inputs is None else inputs
    loss = getattr(module, LOSS, None) if loss is None else loss
    if inputs is None:
        if loss is not None:
            raise ValueError("a loss is given, and not the inputs that it belongs to")
        return None
    given = GivenInputs(
        make=_checked_inputs(inputs) if callable(inputs) else _vary(inputs), loss=loss
    )
    if not given.rows(BatchShape()):
        raise ValueError("the inputs have no tensor with `rows` entries on dim 0")
    return given


def _checked_inputs(inputs: Callable[[int, int], Any]) -> MakeInputs:
    """The user's function, whose mistakes are ValueErrors."""

    def make(rows: int, seed: int) -> Mapping[str, Any]:
        try:
            batch = inputs(rows, seed)
        except Exception as error:
            raise ValueError(f"`{INPUTS}(rows, seed)` fails: {reason(error)}") from error
        if not isinstance(batch, Mapping):
            kind = type(batch).__name__
            raise ValueError(f"`{INPUTS}` gives a {kind}, and not arguments of forward by name")
        return batch

    return make


def seen_inputs(module: nn.Module, argument: str) -> GivenInputs | None:
    """The images or samples of sound that a model takes as its first argument; None for a model
    with a table of embeddings, or without convolutions. The model is moved to the meta device.
    """
    sizes = [*_shapes(module)]
    module = module.to("meta") if sizes else module  # a copy of a module has values on the CPU
    for size in sizes:

        def make(rows: int, seed: int, size: tuple[int, ...] = size) -> Inputs:
            generator = torch.Generator().manual_seed(seed)
            return {argument: torch.randn((rows, *size), generator=generator)}

        try:
            with torch.no_grad():
                module(torch.empty((2, *size), device="meta"))
        except Exception as error:
            if of_the_machine(error):
                raise
            continue
        return GivenInputs(make=make)
    return None


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    modules = list(module.modules())
    if any(isinstance(m, nn.Embedding) for m in modules):
        return
    first = next((m for m in modules if isinstance(m, nn.Conv1d | nn.Conv2d)), None)
    if isinstance(first, nn.Conv1d):
        yield (first.in_channels, _SAMPLES)
        yield (_SAMPLES,)
    if isinstance(first, nn.Conv2d):
        stated = [v for m in modules for n in _SIDES if (v := getattr(m, n, None))]
        sides = [v[0] if isinstance(v, tuple | list) else v for v in stated]
        for side in dict.fromkeys((*(s for s in sides if isinstance(s, int)), *_TRIED)):
            yield (first.in_channels, side, side)


def _in_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows


def _vary(example: Any) -> MakeInputs:
    """Batches like an example: its rows in another order, and numbers that differ a little."""
    if not isinstance(example, Mapping):
        raise ValueError(f"the inputs are a {type(example).__name__}, and not arguments by name")
    first = next((v for v in example.values() if isinstance(v, Tensor) and v.dim()), None)
    if first is None:
        raise ValueError("the inputs have no tensor with rows")
    count = len(first)

    def make(rows: int, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        varied = {**example}
        places = torch.randint(count, (rows,), generator=generator)
        for name, value in example.items():
            if not _in_rows(value, count):
                continue
            varied[name] = value.detach().cpu()[places]
            if value.is_floating_point():
                noise = torch.randn(varied[name].shape, generator=generator)
                varied[name] = varied[name] + 0.1 * noise.to(value.dtype)
        return varied

    return make
