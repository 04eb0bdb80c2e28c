"""How a model's loss counts labels: a step weighs the mean of each pass by their number."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from planc.model.small.user_model import TARGETS
from planc.runtime.gradients import valid_labels
from planc.runtime.standalone.loss import IGNORED

_MEANS = {f: inspect.signature(f) for f in (functional.cross_entropy, functional.nll_loss)}
_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")
UNSEEN, UNCLEAR, PLAIN, SHIFTED = range(4)
"""What a pass shows: no mean over the labels; one, of labels that all are ignored; one over all
labels of a row; one over those of the next tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRule:
    """Which labels a loss is the mean of.

    Args:
        shifted: whether a model predicts the next token, and so not the first one of a row.
        ignored: the label that does not count.
    """

    shifted: bool
    ignored: int = IGNORED

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """The labels that count; rows, where there are no labels of tokens."""
        labels = labels_of(batch)
        if labels is not None:
            return valid_labels(labels, shifted=self.shifted, ignored=self.ignored)
        first = next(value for value in batch.values() if isinstance(value, Tensor))
        return torch.tensor(float(len(first)))


def rule_of(model: nn.Module) -> LabelRule:
    """The rule that the class of a model states: causal, unless transformers says otherwise. The
    labels of a decoder behind an encoder are shifted in its input.
    """
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return LabelRule(shifted=not decodes and getattr(model, "loss_type", None) not in _UNSHIFTED)


def labels_of(batch: Mapping[str, Any]) -> Tensor | None:
    """The integer labels of a batch, under the names that planc knows; None without."""
    for name in TARGETS:
        value = batch.get(name)
        if isinstance(value, Tensor) and not value.is_floating_point():
            return value
    return None


class SeenLabels(TorchFunctionMode):  # type: ignore[misc]
    """Notes what the means over labels of a pass are taken of."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MEANS:
            given = _MEANS[func].bind(*args, **(kwargs or {}))
            given.apply_defaults()
            target, ignored = given.arguments["target"], given.arguments["ignore_index"]
            plain = given.arguments["weight"] is None and given.arguments["reduction"] == "mean"
            if plain and not target.is_floating_point():
                self.taken.append((target.detach().flatten(), ignored))
        return func(*args, **(kwargs or {}))

    def shown(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        """What a pass of a batch has shown, and the label that it ignores; forgets the pass."""
        labels, taken = labels_of(batch), self.taken
        self.taken = []
        if labels is None:
            return UNSEEN, IGNORED
        for target, ignored in taken:
            next_ones = pad(labels, (0, 1), value=ignored)[..., 1:], labels[..., 1:]
            shifted = labels.dim() > 1 and any(_same(target, some) for some in next_ones)
            plain = _same(target, labels)
            if plain or shifted:
                found = PLAIN if plain else SHIFTED
                return (UNCLEAR if plain and shifted else found), ignored
        return UNSEEN, IGNORED


def _same(target: Tensor, labels: Tensor) -> bool:
    own = labels.flatten().to(target.device)
    return target.shape == own.shape and bool((target == own).all())
