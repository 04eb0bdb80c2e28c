"""What a small model is run on: tokens and labels, and images or sound where it takes them.

There is no processor here and none of a folder's code: what goes into a tower is read off its
configuration and the arguments of the model's forward. A few kinds of input are known
(`sample_inputs.py`); they are tried on the small model as it is, and the first with which more of
its parameters get a gradient is the one. How many tokens stand for an image the tower itself tells.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planc.model.small.sample_inputs import INPUT_KINDS, InputKind, Inputs

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Of the text that a model is run on.

    Args:
        rows: of the batch.
        length: of a row, in tokens; rows are as many times longer as images ask for.
        seed: of the tokens.
        ends: how many tokens at either end of the vocabulary stay out; 0 always does, for it
            often stands for padding.
    """

    rows: int = 4
    length: int = 16
    seed: int = 3
    ends: int = 0

    def text(self, vocabulary: int, least: int = 0) -> Inputs:
        """Random `input_ids` and `labels`, [rows, length].

        Args:
            vocabulary: the number of tokens there are.
            least: that a row must hold.
        """
        import torch

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
    """A kind that reaches a tower.

    Args:
        kind: the recipe.
        tokens: that stand for it, in each row.
        token: their number in the vocabulary, None where none stands for it.
    """

    kind: InputKind
    tokens: int
    token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChoice:
    """What was found out for one model.

    Args:
        chosen: kinds, in the order in which their tokens stand in a row.
        missing: what no kind was found for, with the reason; empty where nothing is missing.
    """

    chosen: tuple[ChosenInput, ...] = ()
    missing: str = ""

    @property
    def tokens(self) -> int:
        """Of a row, that stand for something else."""
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
    """The names of what a model's forward takes."""
    return tuple(inspect.signature(model_class.forward).parameters)


def takes_more_than_text(model_class: Any) -> bool:
    """Whether a model takes more than text."""
    names = forward_arguments(model_class)
    return any(set(kind.needs) <= set(names) for kind in INPUT_KINDS)


def choose(model: nn.Module, config: Any, text: Callable[[InputChoice], Inputs]) -> InputChoice:
    """The kinds of input with which more of a model gets a gradient.

    Args:
        model: the small model as it is; it is run, and its gradients are gone afterwards.
        config: its configuration object.
        text: gives inputs for a choice, to run the model on.
    """
    names = forward_arguments(type(model))
    choice, missing = InputChoice(), []
    best, _ = _reached(model, text, choice)
    for what in dict.fromkeys(kind.what for kind in INPUT_KINDS):
        some = [k for k in INPUT_KINDS if k.what == what and set(k.needs) <= set(names)]
        tried: list[str] = []
        for kind in some:
            own = _with_tokens(model, config, kind)
            count, why = _reached(model, text, InputChoice(chosen=(*choice.chosen, own)))
            if count < 0 and (tokens := _tokens_asked_for(why, model)) and own.token is not None:
                own = replace(own, tokens=tokens)
                count, why = _reached(model, text, InputChoice(chosen=(*choice.chosen, own)))
            if count > best:
                best, choice = count, InputChoice(chosen=(*choice.chosen, own))
                break
            tried.append(f"{kind.name} ({why or 'nothing more gets a gradient'})")
        else:
            if some:
                missing.append(f"no input was found for its {what}: tried {', '.join(tried)}")
    return InputChoice(chosen=choice.chosen, missing="; ".join(missing))


def _reached(
    model: nn.Module, text: Callable[[InputChoice], Inputs], choice: InputChoice
) -> tuple[int, str]:
    """How many parameters get a gradient; -1, and why, where the model does not run."""
    try:
        loss = getattr(model(**text(choice)), "loss", None)
        if loss is None:
            return -1, "no loss"
        loss.backward()
        return sum(p.grad is not None for p in model.parameters()), ""
    except Exception as error:
        return -1, _first(error)
    finally:
        model.zero_grad(set_to_none=True)


def _with_tokens(model: Any, config: Any, kind: InputKind) -> ChosenInput:
    """A kind with the number of tokens that the tower makes of it; 0 where it does not tell."""
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
        made = make_inputs(kind, tower, config, 2, 0)
        tokens = _tokens_of_tower(features, {n: v for n, v in made.items() if n in wanted}, model)
    return ChosenInput(kind=kind, tokens=tokens, token=int(token))


def _tokens_of_tower(features: Any, made: Inputs, model: Any) -> int:
    """The tokens that a tower makes of each of two rows; 0 where it does not run by itself."""
    import torch

    try:
        with torch.no_grad():
            found = features(**made)
    except Exception:
        return 0
    return _elements(found) // int(model.get_input_embeddings().weight.shape[-1]) // 2


def _tokens_asked_for(why: str, model: Any) -> int:
    """The tokens of a row that a model asks for when there are too few; 0 where it asks for none.

    A number is read from an error's text here, for transformers states it nowhere else: the
    features are counted inside the forward, after masks and merges that no configuration has.

    Args:
        why: transformers' error, such as `Image features and image tokens do not match, tokens: 8,
            features 16`; some models count features, and others the numbers in them.
        model: the small model.
    """
    match = re.search(r"tokens: \d+, features:? (\d+)", why)
    if match is None:
        return 0
    count, width = int(match[1]), int(model.get_input_embeddings().weight.shape[-1])
    rows = BatchShape().rows
    return (count // width if count % (width * rows) == 0 else count) // rows


def _elements(found: Any) -> int:
    """The numbers in what a tower gives for the language model."""
    import torch

    found = getattr(found, "pooler_output", found)
    if isinstance(found, torch.Tensor):
        return int(found.numel())
    if isinstance(found, list | tuple):
        if found and isinstance(found[0], list | tuple):
            return _elements(found[0])
        return sum(_elements(v) for v in found)
    return 0


def tower_of(config: Any, what: str) -> Any:
    """The configuration of the tower, the model's own where it has none apart."""
    return next((t for n in _TOWERS[what] if (t := getattr(config, n, None))), config)


def make_inputs(kind: InputKind, tower: Any, config: Any, rows: int, seed: int) -> Inputs:
    """What a recipe gives, with what it needs of the configuration around the tower."""
    import torch

    if (pinpoints := getattr(config, "image_grid_pinpoints", None)) is not None:
        tower = _TowerWithPinpoints(tower, pinpoints)
    return kind.make(tower, rows, torch.Generator().manual_seed(seed))


class _TowerWithPinpoints:
    """A tower's configuration with the sizes that images are cut to, which stand outside it."""

    def __init__(self, tower: Any, pinpoints: Any) -> None:
        self._tower = tower
        self.planc_pinpoints = pinpoints

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)


# Inputs ------------------------------------------------------------------------------------------


def codebook_inputs(shape: BatchShape, vocabulary: int, codebooks: int) -> Inputs:
    """Codes of sound instead of text: several books of them at every place.

    Args:
        shape: of the text.
        vocabulary: the number of codes in a book.
        books: how many.

    Returns:
        `input_ids` [rows * books, length] and `labels` [rows, length, books].
    """
    made = replace(shape, rows=shape.rows * codebooks).text(vocabulary)
    made["labels"] = made["labels"].view(shape.rows, codebooks, -1).transpose(1, 2).contiguous()
    return made


def add_tower_inputs(
    inputs: Inputs, choice: InputChoice, config: Any, names: tuple[str, ...]
) -> Inputs:
    """Text with what goes into the towers, and the tokens that stand for it.

    Args:
        inputs: `input_ids` and `labels`, [rows, length].
        choice: what there is beside text.
        config: of the model.
        names: what its forward takes.
    """
    import torch

    made: Inputs = dict(inputs)
    tokens = made["input_ids"]
    for special in _special(config):
        tokens[tokens == special] = 1 if special != 1 else 2
    place, types = 2, torch.zeros_like(tokens)
    for number, one in enumerate(choice.chosen, 1):
        tower = tower_of(config, one.kind.what)
        more = make_inputs(one.kind, tower, config, len(tokens), 4 + number)
        made |= {n: v for n, v in more.items() if n in names}
        if one.token is not None:
            tokens[:, place : place + one.tokens] = one.token
            types[:, place : place + one.tokens] = 1 if one.kind.what == "images" else 3
            place += one.tokens
    if choice.chosen:
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in names:
                made[name] = types
        if "qformer_input_ids" in names:
            made["qformer_input_ids"] = tokens[:, :4].clamp(max=7)
    return {n: v for n, v in made.items() if n in names or n == "labels"}


def _special(config: Any) -> list[int]:
    """The tokens that stand for something other than text."""
    values = vars(config).items()
    return [v for n, v in values if n.startswith(_SPECIAL) and isinstance(v, int) and "token" in n]


def part_of(inputs: Mapping[str, Any], rank: int, ranks: int) -> Inputs:
    """What one rank of a data axis reads.

    Args:
        inputs: of all ranks.
        rank: its number.
        ranks: how many there are; every input's outermost dim divides by it.
    """
    found: Inputs = {}
    for name, value in inputs.items():
        own = len(value) // ranks
        found[name] = value[rank * own : (rank + 1) * own]
    return found


def _first(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return text[:120] or type(error).__name__
