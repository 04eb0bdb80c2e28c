"""The tokens that a loss takes, by the gradient that reaches the logits of a model.

A script may compute its loss from logits, with labels that planc does not see. The gradient of a
cross entropy by the logits of a token is `weight * (softmax(logits) - one_hot(label))`, which shows
the label of each token and its weight in the loss of the rank. The weights of other losses are read
from their autograd graph (`loss_graph`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planc.diagnostics.diagnostic import Label
from planc.runtime.safeguards.loss_graph import await_loss, weights_of
from planc.runtime.standalone.shards import whole_of

_ENTRIES = 2**22
"""The logits that are compared at a time: their copies in float32 take 16 MiB each."""
_CERTAIN = 1e-6
"""The least squared length of `softmax - one_hot` from which a weight is computed."""
_RESIDUAL = 0.1
"""The largest part of a gradient that is not that of a cross entropy."""
_CLOSE = 0.25
"""The spread of means over that of weights, below which ranks take means of their own tokens."""
_UNKNOWN = (-1.0, 0.0, 0.0)
NUMBERS = len(_UNKNOWN)
"""The integers that a rank sends of a loss."""


@dataclass(frozen=True, slots=True)
class LossRows:
    """The tokens that the loss of a pass counts on one rank.

    Args:
        tokens: their number, or that of the values that another loss averages; -1 if it is not
            known.
        weight: the mean weight of one of them.
        strayed: how many of this rank's tokens have another label than that of the next token.
    """

    tokens: float
    weight: float
    strayed: float


class LossRowsOfPass:
    """Computes `LossRows` in the backward pass of some logits.

    Args:
        logits: `[..., entries]`, which a loss is computed of.
        labels: of the tokens after each one, `[...]`; None if they are not known.
        place: the line of the script that computes the logits.
    """

    def __init__(self, logits: Tensor, labels: Tensor | None, place: Sequence[Label]) -> None:
        self.place, self._found = place, torch.tensor(_UNKNOWN, dtype=torch.float64)
        known = labels is not None and labels.shape == logits.shape[:-1]
        self._labels = labels if known else None
        self._logits: Tensor | None = logits.detach()  # a hook of its own tensor would be a cycle
        self._weights: tuple[float, float] | None = None
        await_loss(self._observe)
        logits.register_hook(self._measure)

    def _observe(self, outputs: Sequence[Any]) -> None:
        """Reads the graph of the loss, which the backward pass frees."""
        self._weights = weights_of(outputs)

    def _measure(self, gradient: Tensor) -> None:
        logits, self._logits = self._logits, None
        if logits is not None:
            with torch.no_grad():
                self._found = measure_rows(whole_of(logits), whole_of(gradient), self._labels)
                if self._weights is not None:
                    other = self._found.new_tensor([*self._weights, 0.0])
                    self._found = torch.where(self._found[0] < 0, other, self._found)

    def as_bits(self, device: str) -> Tensor:
        """The three numbers of `LossRows` as the bits of int64, which ranks exchange."""
        return self._found.to(device).view(torch.int64)


def from_bits(bits: Sequence[int]) -> LossRows:
    """The inverse of `LossRowsOfPass.as_bits`."""
    return LossRows(*torch.tensor(bits).view(torch.float64).tolist())


def nothing_sent(device: str) -> Tensor:
    """The numbers that a rank sends if its last pass was not measured."""
    return torch.tensor(_UNKNOWN, dtype=torch.float64, device=device).view(torch.int64)


def own_means(ranks: Sequence[LossRows]) -> bool:
    """Whether the loss of each rank is a mean over its own tokens, of which ranks have different
    numbers: the weights of all tokens of a rank have one sum, where those of one token differ.
    """
    if min(rows.tokens for rows in ranks) <= 0 or len({rows.tokens for rows in ranks}) < 2:
        return False
    weights = _spread([rows.weight for rows in ranks])
    return _spread([rows.weight * rows.tokens for rows in ranks]) < _CLOSE * weights


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / max(*map(abs, values), 1e-300)


_NEXT_LABELS = "_planc_next_labels"
"""The attribute of a part's tokens: the labels of the tokens after them."""


def note_next_labels(part: Mapping[str, Any], labels: Tensor | None) -> None:
    """Keeps the labels of the next tokens with a part of a batch, which a script may pass to the
    model later, after other parts.
    """
    for name in ("input_ids", "inputs_embeds"):
        if part.get(name) is not None:
            setattr(part[name], _NEXT_LABELS, labels)


def noted_next_labels(inputs: Iterable[Any]) -> Tensor | None:
    """The labels of the next tokens that are kept with the inputs of a pass; None without."""
    kept = (getattr(value, _NEXT_LABELS, None) for value in inputs)
    return next((labels for labels in kept if labels is not None), None)


def logits_of(output: Any) -> Tensor | None:
    """The logits in a model's output, or else its first tensor that a loss can be computed of."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    others = output if isinstance(output, tuple | list) else ()
    tensors = (value for value in (named, output, *others) if isinstance(value, Tensor))
    return next((t for t in tensors if t.requires_grad and t.dim() > 1), None)


def measure_rows(logits: Tensor, gradient: Tensor, labels: Tensor | None) -> Tensor:
    """The three numbers of `LossRows`, in float64, on the device of the logits.

    Args:
        logits, gradient: `[..., entries]`.
        labels: `[...]`; negative ones do not count.
    """
    entries = logits.shape[-1]
    rows = max(1, _ENTRIES // entries)
    pairs = zip(
        logits.reshape(-1, entries).split(rows),
        gradient.reshape(-1, entries).split(rows),
        strict=True,
    )
    parts = [_of_chunk(*pair) for pair in pairs]
    sums = torch.stack([sums for _, _, sums in parts]).sum(0)
    certain, weight, residual, total = sums.unbind()
    taken, targets = (torch.cat([part[i] for part in parts]) for i in range(2))
    tokens = taken.sum()
    known = (tokens > 0) & (certain > 0) & (residual <= _RESIDUAL**2 * total)
    strayed = tokens.new_zeros(())
    if labels is not None:
        strayed = _count_wrong_labels(taken.view_as(labels), targets.view_as(labels), labels)
    found = torch.stack([tokens.double(), weight / certain, strayed.double()])
    return torch.where(known, found, found.new_tensor(_UNKNOWN))


def _of_chunk(logits: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that have a gradient, their labels, and sums over the tokens with a certain
    weight: number, weights, squares of the gradient that is not a cross entropy's, and of all.
    """
    gradient = gradient.float()
    taken = gradient.ne(0).any(-1)
    targets = gradient.argmin(-1)
    slope = logits.float().softmax(-1)
    slope.scatter_add_(-1, targets[:, None], slope.new_full((len(slope), 1), -1.0))
    length = slope.square().sum(-1)
    certain = taken & (length > _CERTAIN)
    weight = torch.where(certain, (gradient * slope).sum(-1) / length, 0.0)
    residual = (gradient - weight[:, None] * slope).square().sum(-1)
    squares = torch.stack([residual, gradient.square().sum(-1)])
    sums = torch.stack([certain.double(), weight.double(), *squares.double()])
    return taken, targets, torch.where(certain, sums, 0.0).sum(-1)


def _count_wrong_labels(taken: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
    """The number of tokens that have another label in the loss, or are left out because a part of a
    sequence was shifted by itself: the last one of each row. Zero for a loss of other labels
    altogether.
    """
    labels = labels.to(targets.device)
    wrong, right = taken & (targets != labels), taken & (targets == labels)
    counted = labels >= 0
    shifted = (taken == counted)[..., :-1].all() & ~taken[..., -1].any()
    lost = torch.where(shifted, counted[..., -1].sum(), 0)
    return torch.where(wrong.sum() < right.sum(), wrong.sum() + lost, 0)
