"""The number of labels that a model's loss counts, by which a step weighs the mean loss of each
pass.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from planc.proxy.user_model import TARGETS
from planc.runtime.gradients import valid_labels
from planc.runtime.standalone.context import PartLoss
from planc.runtime.standalone.loss import IGNORED, ChunkedLoss

_MEANS = {f: inspect.signature(f) for f in (functional.cross_entropy, functional.nll_loss)}
_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")
IGNORE_INDEX = "ignore_index"
"""The argument of transformers' losses for the label that does not count."""
NEXT_LABELS = "shift_labels"
"""The argument of transformers' models for the labels of the next tokens, already shifted."""
UNSEEN, UNCLEAR, PLAIN, NEXT, SHIFTED, GIVEN_NEXT = range(6)
"""The results of observing a pass: no mean over the labels; one, of labels that all are ignored;
one over all labels of a row; one over those of the next tokens, which it shifts or takes from
`shift_labels`, equal in this pass; one over those that it shifts; one over `shift_labels`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRule:
    """The rule by which a loss selects the labels that it averages over.

    Args:
        shifted: whether a model predicts the next token, and so not the first one of a row.
        ignored: the label that does not count, if a batch states none as `ignore_index`.
        takes_next: whether the loss takes `shift_labels` where a batch has them.
    """

    shifted: bool
    ignored: int = IGNORED
    takes_next: bool = False

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """The labels that count; rows, where there are no labels of tokens."""
        ignored = batch.get(IGNORE_INDEX)
        ignored = self.ignored if ignored is None else ignored
        labels = next_labels_of(batch) if self.takes_next else None
        if labels is not None:
            return valid_labels(labels, shifted=False, ignored=ignored)
        labels = labels_of(batch)
        if labels is not None:
            return valid_labels(labels, shifted=self.shifted, ignored=ignored)
        first = next(value for value in batch.values() if isinstance(value, Tensor))
        return torch.tensor(float(len(first)))


def rule_of(model: nn.Module) -> LabelRule:
    """The rule that the class of a model states: causal, unless transformers says otherwise. The
    labels of a decoder behind an encoder are shifted in its input.
    """
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    shifted = not decodes and getattr(model, "loss_type", None) not in _UNSHIFTED
    return LabelRule(shifted=shifted, takes_next=takes_next_labels(model))


def takes_next_labels(model: nn.Module) -> bool:
    """Whether the loss of a model has the argument `shift_labels`."""
    loss = getattr(model, "loss_function", None) or model.forward
    while isinstance(wrapper := getattr(loss, "__self__", loss), ChunkedLoss | PartLoss):
        loss = wrapper.function
    return NEXT_LABELS in inspect.signature(loss).parameters


def next_labels_of(batch: Mapping[str, Any]) -> Tensor | None:
    """The integer labels of the next tokens that a batch states; None without."""
    return _first_labels(batch, (NEXT_LABELS,))


def labels_of(batch: Mapping[str, Any]) -> Tensor | None:
    """The integer labels of a batch, under the names that planc knows; None without."""
    return _first_labels(batch, TARGETS)


def _first_labels(batch: Mapping[str, Any], names: Iterable[str]) -> Tensor | None:
    for name in names:
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
        """The result of observing a pass of a batch, and the label that it ignores; forgets the
        pass.
        """
        labels, given, taken = labels_of(batch), next_labels_of(batch), self.taken
        self.taken = []
        for target, ignored in taken:
            plain = labels is not None and _same(target, labels)
            shifted = labels is not None and _same_shifted(target, labels, ignored)
            if given is not None and _same(target, given):
                kind = NEXT if shifted else GIVEN_NEXT
                return (UNCLEAR if plain else kind), ignored
            if plain or shifted:
                kind = PLAIN if plain else SHIFTED
                return (UNCLEAR if plain and shifted else kind), ignored
        return UNSEEN, IGNORED


def _same_shifted(target: Tensor, labels: Tensor, ignored: int) -> bool:
    next_ones = pad(labels, (0, 1), value=ignored)[..., 1:], labels[..., 1:]
    return labels.dim() > 1 and any(_same(target, shifted) for shifted in next_ones)


def _same(target: Tensor, labels: Tensor) -> bool:
    flat = labels.flatten().to(target.device)
    return target.shape == flat.shape and bool((target == flat).all())
