"""Finds inputs for a proxy model: tokens and labels, and images or audio if it takes them.

No processor and no code from a model's folder is used: tower inputs are derived from the tower's
configuration and the arguments of the model's forward. The known kinds of input
(`sample_inputs.py`) are tried on the proxy model, and the first one with which more parameters get
a gradient is chosen. The number of placeholder tokens is read off the tower's output.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from planc.diagnostics.diagnostic import first_line
from planc.proxy.refused_inputs import of_the_machine
from planc.proxy.sample_inputs import INPUT_KINDS, InputKind, Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The size of the text batch that a model is run on; `length` grows if images need more tokens.

    Args:
        images: how many images the rows have, again and again, where they can have other numbers
            than one each.
        ends: how many ids at either end of the vocabulary are not used; id 0 never is, because it
            often means padding.
    """

    rows: int = 4
    length: int = 16
    seed: int = 3
    ends: int = 0
    images: tuple[int, ...] = ()

    def text(self, vocabulary: int, least: int = 0) -> Inputs:
        """Random `input_ids` and `labels`, [rows, length]."""
        generator = torch.Generator().manual_seed(self.seed)
        high = max(self.ends + 1, vocabulary - self.ends)
        low = min(max(1, self.ends), high - 1)
        size = (self.rows, self.length * max(1, -(-least // self.length)))
        return {
            name: torch.randint(low, high, size, generator=generator)
            for name in ("input_ids", "labels")
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenInput:
    """An input that reaches a tower: its kind, its placeholder `token` if any, and the number."""

    kind: InputKind
    tokens: int
    token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChoice:
    """The kinds of input found, in the order of their placeholders; what was not found, such as
    `images`, and why.
    """

    chosen: tuple[ChosenInput, ...] = ()
    lacks: tuple[str, ...] = ()
    missing: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the kinds."""
        return tuple(candidate.kind.name for candidate in self.chosen)

    @property
    def tokens(self) -> int:
        """The number of placeholder tokens per row."""
        return sum(c.tokens for c in self.chosen)


# The choice --------------------------------------------------------------------------------------

_TOWERS = {
    "images": ("vision_config", "vq_config", "encoder"),
    "sound": ("audio_config", "encoder_config"),
}
_TOKENS = {
    "images": ("image_token_id", "image_token_index"),
    "sound": ("audio_token_id", "audio_token_index"),
}
_FEATURES = {"images": "get_image_features", "sound": "get_audio_features"}
_SPECIAL = ("image_token", "video_token", "audio_token", "vision_", "image_start", "image_end")


def forward_arguments(model_class: Any) -> tuple[str, ...]:
    """The argument names of a model's forward."""
    return tuple(inspect.signature(model_class.forward).parameters)


def takes_more_than_text(model_class: Any) -> bool:
    """Whether a model takes images or audio."""
    names = forward_arguments(model_class)
    return any(set(kind.needs) <= set(names) for kind in INPUT_KINDS)


def choose(model: nn.Module, config: Any, text: Callable[[InputChoice], Inputs]) -> InputChoice:
    """The kinds of input with which most parameters get a gradient; `text` makes a batch."""
    names = forward_arguments(type(model))
    choice, lacks, missing = InputChoice(), [], []
    best, _ = _count_gradients(model, text, choice)
    for what in dict.fromkeys(kind.what for kind in INPUT_KINDS):
        kinds = [k for k in INPUT_KINDS if k.what == what and set(k.needs) <= set(names)]
        tried: list[str] = []
        for kind in kinds:
            candidate = _with_tokens(model, config, kind)
            count, why = _count_gradients(
                model, text, InputChoice(chosen=(*choice.chosen, candidate))
            )
            if (
                count < 0
                and (tokens := _tokens_asked_for(why, model))
                and candidate.token is not None
            ):
                candidate = replace(candidate, tokens=tokens)
                count, why = _count_gradients(
                    model, text, InputChoice(chosen=(*choice.chosen, candidate))
                )
            if count > best:
                best, choice = count, InputChoice(chosen=(*choice.chosen, candidate))
                break
            tried.append(f"{kind.name} ({why or 'nothing more gets a gradient'})")
        else:
            if kinds:
                lacks.append(what)
                missing.append(f"no input was found for its {what}: tried {', '.join(tried)}")
    return InputChoice(chosen=choice.chosen, lacks=tuple(lacks), missing="; ".join(missing))


def choose_known(
    model: nn.Module, config: Any, text: Callable[[InputChoice], Inputs], names: Sequence[str]
) -> InputChoice | None:
    """The inputs of the kinds that another model of the same class takes, or None.

    Args:
        model: the model, which may need another number of placeholder tokens than the other one.
        config: its configuration.
        text: makes the inputs of the model from a choice.
        names: the names of the kinds.

    Returns:
        The choice; None if the model raises with these inputs.
    """
    choice = InputChoice()
    for kind in (kind for name in names for kind in INPUT_KINDS if kind.name == name):
        candidate = _with_tokens(model, config, kind)
        choice, before = InputChoice(chosen=(*choice.chosen, candidate)), choice
        why = _refusal(model, text(choice))
        if why and candidate.token is not None and (tokens := _tokens_asked_for(why, model)):
            candidate = replace(candidate, tokens=tokens)
            choice = InputChoice(chosen=(*before.chosen, candidate))
            why = _refusal(model, text(choice))
        if why:
            return None
    return choice


def _refusal(model: nn.Module, inputs: Inputs) -> str:
    """The reason why a model does not run with these inputs; empty if it does.

    Raises:
        Exception: an error of the machine.
    """
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        if of_the_machine(error):
            raise
        return first_line(error)[:120]
    return ""


def _count_gradients(
    model: nn.Module, text: Callable[[InputChoice], Inputs], choice: InputChoice
) -> tuple[int, str]:
    """The number of parameters that get a gradient; -1 and the reason if the model raises.

    Raises:
        Exception: an error of the machine.
    """
    try:
        loss = getattr(model(**text(choice)), "loss", None)
        if loss is None:
            return -1, "no loss"
        loss.backward()
        return sum(p.grad is not None for p in model.parameters()), ""
    except Exception as error:
        if of_the_machine(error):
            raise
        return -1, first_line(error)[:120]
    finally:
        model.zero_grad(set_to_none=True)


def _with_tokens(model: Any, config: Any, kind: InputKind) -> ChosenInput:
    """A kind with the placeholder tokens that its tower needs; 0 if that is not known."""
    tower = tower_of(config, kind.what)
    token = next((t for n in _TOKENS[kind.what] if (t := getattr(config, n, None))), None)
    if token is None:
        return ChosenInput(kind=kind, tokens=0, token=None)
    name = _FEATURES[kind.what]
    features = getattr(model, name, None)
    tokens = kind.tokens(tower) if kind.tokens else 0
    if features is not None:
        inner = getattr(getattr(model, "model", None), name, features)
        wanted = {*inspect.signature(features).parameters, *inspect.signature(inner).parameters}
        inputs = make_inputs(kind, tower, config, 2, 0)
        tokens = _tokens_of_tower(features, {n: v for n, v in inputs.items() if n in wanted}, model)
    return ChosenInput(kind=kind, tokens=tokens, token=int(token))


def _tokens_of_tower(features: Any, inputs: Inputs, model: Any) -> int:
    """The tokens per row that a tower outputs for a batch of two rows; 0 if it cannot run alone."""
    try:
        with torch.no_grad():
            output = features(**inputs)
    except Exception as error:
        if of_the_machine(error):
            raise
        return 0
    return _elements(output) // int(model.get_input_embeddings().weight.shape[-1]) // 2


def _tokens_asked_for(why: str, model: Any) -> int:
    """The placeholder tokens per row that an error message asks for; 0 if it states none.

    The number is parsed from the message because transformers states it nowhere else: features are
    counted inside the forward, after masks and merges that are not in the configuration.

    Args:
        why: transformers' error, such as `Image features and image tokens do not match, tokens: 8,
            features 16`; some models count feature vectors, others their elements.
    """
    match = re.search(r"tokens: \d+, features:? (\d+)", why)
    if match is None:
        return 0
    count, width = int(match[1]), int(model.get_input_embeddings().weight.shape[-1])
    rows = BatchShape().rows
    return (count // width if count % (width * rows) == 0 else count) // rows


def _elements(output: Any) -> int:
    output = getattr(output, "pooler_output", output)
    if isinstance(output, torch.Tensor):
        return int(output.numel())
    if isinstance(output, list | tuple):
        if output and isinstance(output[0], list | tuple):
            return _elements(output[0])
        return sum(_elements(v) for v in output)
    return 0


def tower_of(config: Any, what: str) -> Any:
    """The configuration of the tower, or that of the model if the tower has none."""
    return next((t for n in _TOWERS[what] if (t := getattr(config, n, None))), config)


def make_inputs(kind: InputKind, tower: Any, config: Any, rows: int, seed: int) -> Inputs:
    """The inputs of one kind, given the configurations of the tower and of the model."""
    if (pinpoints := getattr(config, "image_grid_pinpoints", None)) is not None:
        tower = _TowerWithPinpoints(tower, pinpoints)
    return kind.make(tower, rows, torch.Generator().manual_seed(seed))


class _TowerWithPinpoints:
    """A tower's configuration plus the image sizes that the composite configuration states."""

    def __init__(self, tower: Any, pinpoints: Any) -> None:
        self._tower = tower
        self.planc_pinpoints = pinpoints

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)


# Inputs ------------------------------------------------------------------------------------------


def codebook_inputs(shape: BatchShape, vocabulary: int, codebooks: int) -> Inputs:
    """Audio codes, one id per codebook at every position: `input_ids` [rows * codebooks, length]
    and `labels` [rows, length, codebooks].
    """
    inputs = replace(shape, rows=shape.rows * codebooks).text(vocabulary)
    inputs["labels"] = inputs["labels"].view(shape.rows, codebooks, -1).transpose(1, 2).contiguous()
    return inputs


def add_tower_inputs(
    inputs: Inputs, choice: InputChoice, config: Any, names: tuple[str, ...]
) -> Inputs:
    """The batch of text, [rows, length], with the towers' inputs that forward has `names` for."""
    batch: Inputs = dict(inputs)
    tokens = batch["input_ids"]
    for special in _special(config):
        tokens[tokens == special] = 1 if special != 1 else 2
    place, types = 2, torch.zeros_like(tokens)
    for number, chosen in enumerate(choice.chosen, 1):
        tower = tower_of(config, chosen.kind.what)
        more = make_inputs(chosen.kind, tower, config, len(tokens), 4 + number)
        batch |= {n: v for n, v in more.items() if n in names}
        if chosen.token is not None:
            tokens[:, place : place + chosen.tokens] = chosen.token
            types[:, place : place + chosen.tokens] = 1 if chosen.kind.what == "images" else 3
            place += chosen.tokens
    if choice.chosen:
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in names:
                batch[name] = types
        if "qformer_input_ids" in names:
            batch["qformer_input_ids"] = tokens[:, :4].clamp(max=7)
    return {n: v for n, v in batch.items() if n in names or n == "labels"}


_COUNTED = (
    *("shapes", "places", "merged grids", "grids", "grids of images"),
    *("crops", "sized images", "images"),
)
"""The kinds of input with an entry for each image, whichever row it is in."""
_BETWEEN = 2
"""Tokens between two images of a row."""


def longest(choice: InputChoice, shape: BatchShape) -> int:
    """The tokens that a row needs for its images, the second of which may be twice as large."""
    most = max((*shape.images, 1))
    return 2 + most * (2 * choice.tokens + _BETWEEN) if most > 1 else choice.tokens


def add_uneven_images(
    inputs: Inputs, choice: InputChoice, config: Any, names: tuple[str, ...], shape: BatchShape
) -> Inputs | None:
    """The batch of text, [rows, length], whose rows have `shape.images`, at places that differ by
    row; every second image of a model that takes grids is twice as wide. None for a model that
    takes other inputs than such images.
    """
    (chosen, *others) = choice.chosen or (None,)
    if chosen is None or others or chosen.token is None or chosen.kind.name not in _COUNTED:
        return None
    batch = add_tower_inputs(inputs, InputChoice(), config, names)
    tokens, tower, images = batch["input_ids"], tower_of(config, "images"), list[Inputs]()
    types = torch.zeros_like(tokens)
    for row in range(len(tokens)):
        at = 2 + row % 3
        for _ in range(shape.images[row % len(shape.images)]):
            wide = len(images) % 2 if chosen.kind.name == "grids" else 0
            image = make_inputs(chosen.kind, tower, config, 1 + wide, shape.seed + len(images))
            if wide:
                first = image["image_grid_thw"][:1]
                image["image_grid_thw"] = first * first.new_tensor([1, 1, 2])
            images.append(image)
            end = at + chosen.tokens * (1 + wide)
            tokens[row, at:end] = chosen.token
            types[row, at:end] = 1
            at = end + _BETWEEN
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in names:
            batch[name] = types
    taken = [name for name in images[0] if name in names] if images else []
    return batch | {name: torch.cat([image[name] for image in images]) for name in taken}


def tower_inputs(
    choice: InputChoice, config: Any, names: tuple[str, ...], shape: BatchShape
) -> Inputs:
    """The inputs of a model that takes images or sound alone, which forward has `names` for."""
    inputs: Inputs = {}
    for number, chosen in enumerate(choice.chosen, 1):
        tower = tower_of(config, chosen.kind.what)
        inputs |= make_inputs(chosen.kind, tower, config, shape.rows, shape.seed + number)
    return {name: value for name, value in inputs.items() if name in names}


def _special(config: Any) -> list[int]:
    values = vars(config).items()
    return [v for n, v in values if n.startswith(_SPECIAL) and isinstance(v, int) and "token" in n]


def rank_slice(inputs: Mapping[str, Any], rank: int, ranks: int) -> Inputs:
    """The slice of a batch that one rank of a data axis reads; outermost dims are divisible."""
    slices: Inputs = {}
    for name, value in inputs.items():
        rows = len(value) // ranks
        slices[name] = value[rank * rows : (rank + 1) * rows]
    return slices
