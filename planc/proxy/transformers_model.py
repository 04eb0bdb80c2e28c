"""Builds a small transformers model with weights, to be run in a proof."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from planc.compat.fakes import unset_fake_temporarily
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.model.config import config_of
from planc.model.sources.huggingface import (
    classifies_rows,
    prepare,
    prepare_own,
    quiet,
    training_model,
)
from planc.model.sources.isolation import isolate
from planc.proxy.fakes import fake_inputs
from planc.proxy.input_search import (
    BatchShape,
    InputChoice,
    add_tower_inputs,
    add_uneven_images,
    choose,
    choose_known,
    codebook_inputs,
    forward_arguments,
    longest,
    takes_more_than_text,
    tower_inputs,
)
from planc.proxy.module_copies import copy_module
from planc.proxy.output_loss import loss_and_output, with_output_loss

_SPREAD = 0.05


def seed_cpu(seed: int) -> None:
    """Seeds the CPU's random numbers alone; `torch.manual_seed` reaches a GPU of the script too."""
    torch.random.default_generator.manual_seed(seed)


_EXPERTS_OF_TOKENS = "tid2eid"
"""A router's buffer of the experts of each token id (deepseek_v4), zeros before a checkpoint is
read: all tokens would go to one expert."""


def spread_weights(model: nn.Module, seed: int) -> None:
    """Adds noise to every weight: a norm's weight of 1 or a bias of 0 would hide a wrong split."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * _SPREAD)
        for module in model.modules():
            if isinstance(table := getattr(module, _EXPERTS_OF_TOKENS, None), torch.Tensor):
                scores = torch.rand(len(table), module.num_experts, generator=generator)
                table.copy_(scores.argsort(1)[:, : table.shape[1]])


class TransformersBuilder:
    """Builds the same proxy model several times, of a class in `folder` if the user allowed its
    code, with the `attention` function that a script has registered, if any.

    Raises PlanError (PL60x) if transformers cannot build it, and whatever the folder's code raises.
    """

    def __init__(self, values: dict[str, Any], folder: str = "", attention: str = "") -> None:
        sink = Sink()
        prepared: tuple[Any, Any] | None
        if folder:
            prepared = prepare_own(folder, values)
        else:
            prepared = prepare(config_of(values, "the proxy model"), sink)
        if prepared is None:
            raise PlanError(sink)
        self._cls, self._part = prepared
        self._folder, self._attention = folder, attention or "eager"
        self._choice: InputChoice | None = None
        self._built: tuple[int, nn.Module, Any] | None = None
        self._codebooks: int | None = None

    @property
    def vocabulary(self) -> int:
        """The vocabulary size in the configuration, else 64."""
        text = self._part.get_text_config(decoder=True)
        size = getattr(self._part, "vocab_size", 0) or getattr(text, "vocab_size", 0)
        return int(size or 64)

    def build(self, seed: int) -> nn.Module:
        """The model on the CPU in float32, training, with eager attention or the script's own, by
        the seed alone: a copy of the last one where that had the same, unless a folder's code may
        hold what cannot be copied.
        """
        if self._built is None or self._built[0] != seed:
            seed_cpu(seed)
            with quiet(), isolate():
                # a copy: a plan changes the configuration of its model
                config = copy.deepcopy(self._part)
                model = self._cls._from_config(config, attn_implementation=self._attention)
            spread_weights(model, seed + 1)
            state = torch.random.default_generator.get_state()
            self._built = seed, model.float().train(), state
        _, model, state = self._built
        if self._folder:
            self._built = None
            return self._with_loss(model)
        torch.random.default_generator.set_state(state)
        return self._with_loss(copy_module(model, {}))

    def build_on_meta(self) -> nn.Module:
        """The model without memory, in bfloat16: torch has no grouped products of other fakes."""
        attention = "sdpa" if self._attention == "eager" else self._attention
        with torch.device("meta"):
            model = training_model(self._cls, copy.deepcopy(self._part), "bfloat16", attention)
        return self._with_loss(model)

    def _with_loss(self, model: nn.Module) -> nn.Module:
        if self._without_text or not {"labels", "decoder_input_ids"} & {*self.names}:
            with_output_loss(model)
        else:
            add_denoising_loss(model)
        return model

    @property
    def names(self) -> tuple[str, ...]:
        """The argument names of the model's forward."""
        return forward_arguments(self._cls)

    @property
    def _without_text(self) -> bool:
        """Whether the model takes images or sound alone; classes of such a model take one label
        for each, whose loss is replaced by that of the output too.
        """
        return not {"input_ids", "decoder_input_ids"} & {*self.names}

    @property
    def choice(self) -> InputChoice:
        """The inputs besides text, found once by running the model."""
        if self._choice is None:
            self._choice = InputChoice()
            if takes_more_than_text(self._cls):
                model = self.build(0)
                self._choice = choose(model, self._part, lambda c: self._inputs(c, BatchShape()))
        return self._choice

    def choose_on_fakes(
        self, build: Callable[[], nn.Module], input_kinds: Sequence[str] = ()
    ) -> None:
        """Finds the inputs besides text, inside a `FakeTensorMode`.

        Args:
            build: builds the model on fake tensors; called only if the model takes such inputs.
            input_kinds: the kinds of inputs besides text that a proxy model of the class takes;
                empty if unknown.
        """
        if self._choice is None:
            self._choice = InputChoice()
            if takes_more_than_text(self._cls):
                given = (build(), self._part, self._fake_inputs)
                known = choose_known(*given, input_kinds) if input_kinds else None
                self._choice = known or choose(*given)

    def _fake_inputs(self, choice: InputChoice) -> dict[str, Any]:
        with unset_fake_temporarily():
            inputs = self._inputs(choice, BatchShape())
        return fake_inputs(inputs)

    @property
    def codebooks(self) -> int:
        """The number of audio codebooks that the model reads at once; 0 for a model of text."""
        if self._codebooks is None:
            many = getattr(self._part, "num_codebooks", None) or 0
            heads = getattr(self.build_on_meta(), "lm_heads", ()) if many > 1 else ()
            self._codebooks = many if len(heads) == many else 0
        return self._codebooks

    def sample(self, shape: BatchShape | None = None) -> dict[str, Any]:
        """Token ids and labels, [rows, length] (a classifier's: [rows]), and inputs of towers; a
        row is at least as long as the placeholder tokens of images require. An embedding model has
        no labels, and an encoder of images or sound no ids either.
        """
        return self._inputs(self.choice, shape or BatchShape())

    def _inputs(self, choice: InputChoice, shape: BatchShape) -> dict[str, Any]:
        if self._without_text:
            return tower_inputs(choice, self._part, self.names, shape)
        least = longest(choice, shape) + shape.length // 2 if choice.tokens else 0
        if self.codebooks:
            return codebook_inputs(shape, self.vocabulary, self.codebooks)
        sample = shape.text(self.vocabulary, least)
        if classifies_rows(self._cls):
            sample["labels"] = sample["labels"][:, 0] % self._part.num_labels
        if takes_more_than_text(self._cls):
            given = (sample, choice, self._part, self.names)
            uneven = add_uneven_images(*given, shape) if shape.images else None
            sample = uneven or add_tower_inputs(*given)
        labeled = {"labels", "decoder_input_ids"} & {*self.names}
        return sample if labeled else {n: v for n, v in sample.items() if n != "labels"}


def without_cache(model: nn.Module) -> None:
    """Sets `use_cache = False` in every configuration that a module holds, as a plan has it
    (ops/configure.py): some caches read fields that the configuration lacks.
    """
    for config in (getattr(module, "config", None) for module in model.modules()):
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False


def add_denoising_loss(model: nn.Module) -> None:
    """Adds a loss, in place, to a block diffusion model, whose forward takes no labels.

    Token ids become the prompt and the shifted labels the canvas, so the whole model runs; the
    loss is the mean cross entropy of the canvas. An encoder with a decoder that gives no logits has
    the loss of its output.
    """
    plain = model.forward
    names = inspect.signature(plain).parameters
    if "labels" in names or "decoder_input_ids" not in names:
        return

    def forward(input_ids: Any, labels: Any, **others: Any) -> Any:
        canvas = labels.roll(1, -1).clamp(min=0)  # an ignored label is no token
        output = plain(input_ids=input_ids, decoder_input_ids=canvas, **others)
        if not hasattr(output, "logits"):
            return loss_and_output(output)
        output.loss = cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return output

    model.forward = forward
