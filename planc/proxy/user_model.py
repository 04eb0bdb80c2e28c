"""A user's own model, as an object that builds copies of it, its inputs and its loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from planc.model.config import is_diffusers
from planc.model.module_table import already_parallel
from planc.model.sources.huggingface import user_factory
from planc.proxy.diffusers_model import DiffusersBuilder
from planc.proxy.given_inputs import given_inputs, seen_inputs
from planc.proxy.input_search import BatchShape, InputChoice
from planc.proxy.module_copies import copy_module
from planc.proxy.output_loss import causal_output
from planc.proxy.shrink import UNSHRUNK
from planc.proxy.transformers_model import TransformersBuilder, seed_cpu, spread_weights


def copies_of(module: nn.Module) -> Callable[[], nn.Module]:
    """A factory of copies of a module on the CPU, with weights of their own: a verdict is of code,
    and not of the weights that a script has drawn or loaded. The module itself is not touched.

    Raises:
        ValueError: the module is parallel already, or has a buffer on meta, whose values only its
            own code knows.
    """
    if reason := already_parallel(module):
        raise ValueError(f"it is parallel already: {reason}")
    lost = next((name for name, buffer in module.named_buffers() if buffer.is_meta), None)
    if lost is not None:
        raise ValueError(
            f"its buffer {lost} is on the meta device, and only its own code computes the values: "
            "build it on the CPU"
        )

    def make() -> nn.Module:
        copied = copy_module(module, {})
        if torch.get_default_device().type == "meta":  # to be looked at, and not to be run
            return copied
        known: dict[int, Any] = {}
        for inner in copied.modules():
            for name, parameter in inner._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if id(parameter) not in known:
                        known[id(parameter)] = _fill(parameter)
                    inner._parameters[name] = known[id(parameter)]
        copied = copied.to("cpu")
        _draw(copied)
        return copied

    return make


def without_devices(module: nn.Module) -> nn.Module:
    """A copy that a process without devices can read: parameters on meta, buffers on the CPU."""
    known: dict[int, Any] = {id(b): b.detach().cpu() for b in module.buffers()}
    for p in module.parameters():
        known[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy_module(module, known)


def _draw(model: nn.Module) -> None:
    """Gives all parameters new values: torch's layers their first ones; others numbers of the size
    that they have, unless all are equal, as its code has set them.
    """
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None and type(module).__module__.startswith("torch.nn."):
            reset()
            continue
        for parameter in module._parameters.values():
            if parameter is None or not parameter.is_floating_point() or parameter.numel() < 2:
                continue
            values = parameter.detach().float()
            width, mean = float(values.std()), float(values.mean())
            if width > 0:
                width = 2.0 ** round(math.log2(width))  # of another drawing the same
                drawn = torch.randn(values.shape) * width + round(mean / width) * width
                parameter.data.copy_(drawn)


def _fill(parameter: Any) -> Any:
    wide = parameter.shape[-1] if parameter.dim() > 1 else 1
    values = torch.randn(parameter.shape) * wide**-0.5
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


Given = tuple[Any, Any]
"""Inputs and a loss, as `given_inputs` takes them; None for what is not said."""
_LABELS = "_planc_labels"  # where a model keeps the labels of the pass that runs
TARGETS = ("labels", "targets", "target", "y", "label", "tgt")
"""The names of labels that planc knows, the likeliest first."""


def builder_of(
    values: dict[str, Any],
    code: str,
    module: nn.Module | None = None,
    *,
    dropout: bool = False,
    given: Given = (None, None),
    attention: str = "",
) -> ModelBuilder:
    """The object that builds a model to be run.

    Args:
        values: the configuration of a transformers or diffusers model.
        code: the factory of a user's own model, or the folder with the code of a model that has a
            configuration; else empty.
        module: a user's own model, of which copies are run.
        dropout: whether a user's own model keeps its dropout.
        given: what the user says of the inputs and the loss of such a model.
        attention: the name of an attention function of the script's own.

    Raises:
        PlanError: transformers or diffusers cannot build the configuration.
        ValueError: the inputs of a diffusers class are not known.
        Exception: whatever the user's code raises.
    """
    if module is not None:
        return UserModelBuilder(copies_of(module), dropout=dropout, given=given)
    if code and not values:
        return UserModelBuilder(user_factory(code), dropout=dropout)
    if is_diffusers(values):
        return DiffusersBuilder(values)
    return TransformersBuilder(values, code, attention)


class UserModelBuilder:
    """Builds the user's model with the interface of a transformers model.

    The user may say what its forward takes and what the loss is (`given_inputs`). Otherwise the
    first argument of its forward is token ids, or what its first convolution takes; another may be
    the target, under one of a few names (`labels`, `targets`, ...). The forward then returns a loss
    and logits: in a tuple, a dict or an object. Without a target it returns logits, whose loss is
    the labels' cross entropy. Raises ValueError if the model is too large, or its forward has no
    argument.
    """

    def __init__(
        self, make: Callable[[], nn.Module], *, dropout: bool = False, given: Given = (None, None)
    ) -> None:
        self._make = make
        self._dropout = dropout
        self._build_meta(given)

    def _build_meta(self, given: Given) -> None:
        with torch.device("meta"):
            model = self._make()
        count = sum(p.numel() for p in model.parameters())
        if count > UNSHRUNK:
            raise ValueError(f"it has {count:,} parameters: give a smaller model of the same code")
        self._given = given_inputs(*given, model)
        names = list(inspect.signature(model.forward).parameters)
        if not names:
            raise ValueError("its forward takes no argument")
        self._given = self._given or seen_inputs(model, names[0])
        self._ids = names[0]
        self._target = next((n for n in TARGETS if n in names[1:]), None)
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        self.vocabulary = int(max(tables, default=64))

    def build(self, seed: int) -> nn.Module:
        """The model on the CPU in float32, in training mode, without dropout unless it is kept."""
        seed_cpu(seed)
        model = self._make()
        spread_weights(model, seed + 1)
        return self._prepare(model).float().train()

    def build_on_meta(self) -> nn.Module:
        """The model without memory, otherwise as `build` gives it."""
        with torch.device("meta"):
            model = self._make()
        return self._prepare(model.to("meta")).train()

    def _prepare(self, model: nn.Module) -> nn.Module:
        """The model with its inputs and its loss under planc's names, in place, without dropout."""
        for module in () if self._dropout else model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        if self._given is None:
            model.register_forward_pre_hook(self._rename_inputs, with_kwargs=True)
            model.register_forward_hook(self._wrap_output)
        else:
            model.register_forward_pre_hook(self._add_inputs, with_kwargs=True)
            model.register_forward_hook(self._add_loss, with_kwargs=True)
        return model

    choice = InputChoice()
    """No kinds of input are tried on a user's own model."""

    def sample(self, shape: BatchShape | None = None) -> dict[str, Any]:
        """Token ids and labels, [rows, length] each, or what the user says, rows outermost."""
        shape = shape or BatchShape()
        return shape.text(self.vocabulary) if self._given is None else self._given.rows(shape)

    def _add_inputs(
        self, _module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        assert self._given is not None
        tensor = next((v for v in kwargs.values() if isinstance(v, torch.Tensor)), None)
        place = tensor.device if tensor is not None else "cpu"
        others = self._given.constant_inputs.items()
        fixed = {n: v.to(place) if isinstance(v, torch.Tensor) else v for n, v in others}
        return args, {**fixed, **{n: v for n, v in kwargs.items() if n != "use_cache"}}

    def _add_loss(self, module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        assert self._given is not None
        stages = getattr(module, "_planc_pipeline", None)
        if stages is not None and stages.running != stages.count - 1:
            return output  # hidden states
        return self._given.output(output, kwargs)

    def _rename_inputs(
        self, module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        renamed = {"input_ids": self._ids, "labels": self._target}
        module.__dict__[_LABELS] = kwargs.get("labels")
        named = {renamed.get(k, k): v for k, v in kwargs.items() if k != "use_cache"}
        named.pop(None, None)
        return args, named  # type: ignore[return-value]

    def _wrap_output(self, module: Any, _args: Any, output: Any) -> Any:
        labels = module.__dict__.pop(_LABELS, None)
        if labels is None and isinstance(output, torch.Tensor):
            return output  # hidden states: of a stage of a pipeline before the last
        if self._target is None:  # the loss is computed outside
            logits = output if isinstance(output, torch.Tensor) else _logits(output)
            return causal_output(_loss(logits, labels), logits)
        if hasattr(output, "loss"):
            return output
        if isinstance(output, dict):
            return causal_output(output.get("loss"), output.get("logits"))
        values = [v for v in output if isinstance(v, torch.Tensor) and v.is_floating_point()]
        loss = next((v for v in values if v.dim() == 0), None)
        return causal_output(loss, _logits(output))


def _logits(output: Any) -> Any:
    logits = getattr(output, "logits", None)
    if logits is None:
        values = output.values() if isinstance(output, dict) else output
        floats = (v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
        logits = next((v for v in floats if v.dim() >= 2), None)
    return logits


def _loss(logits: Any, labels: Any) -> Any:
    """The cross entropy of a model that returns logits alone; None for other outputs."""
    from torch.distributed.tensor import DTensor

    if logits is None or labels is None:
        return None
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return functional.cross_entropy(whole.flatten(0, -2).float(), labels.flatten())


ModelBuilder = TransformersBuilder | UserModelBuilder | DiffusersBuilder
"""Builds a proxy model and its inputs: `build(seed)` and `sample(shape)`."""
