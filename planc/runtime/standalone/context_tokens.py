"""The tokens of a batch on a context rank, and facts of all tokens for masks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from planc.runtime.standalone.collectives import all_gather

TOKENWISE = (
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "attention_mask",
    "labels",
    "shift_labels",
)
"""A model's arguments with a value for each token, `[rows, length, ...]`."""
NO_TARGET = -100
"""The label of a token that does not count."""


class ContextError(ValueError):
    """A model or a batch that cannot be computed on sequence shards."""


def part_of_batch(
    batch: Mapping[str, Any],
    rank: int,
    ranks: int,
    balance: str,
    counting: Callable[[Mapping[str, Any]], Tensor | None] | None = None,
) -> dict[str, Any]:
    """A rank's part of a batch, as of `ContextParallel.batch`.

    Args:
        batch: of all ranks.
        rank, ranks: which part of how many.
        balance: as of `ContextParallel`.
        counting: from a batch to the positions that the model counts itself.
    """
    whole = dict(batch)
    first = next((whole[n] for n in TOKENWISE[:2] if whole.get(n) is not None), None)
    if first is None:
        raise ContextError("the batch has no `input_ids`")
    rows, length = first.shape[:2]
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.dim():
            require_tokenwise(name, value, rows, length)
    places = torch.arange(length, device=first.device)[None]
    if whole.get("position_ids") is not None:
        places = whole["position_ids"]
    else:
        counted = counting and counting(batch)
        whole["position_ids"] = places if counted is None else counted
    whole["position_ids"] = whole["position_ids"].expand(rows, -1)
    if whole.get("labels") is not None and whole.get("shift_labels") is None:
        # before the split: the label of a part's last token is in another part
        whole["shift_labels"] = next_labels(whole["labels"], whole.get("ignore_index"))
    packed = whole.get("attention_mask") is None
    owner = owners(places.expand(rows, -1), ranks, balance, packed=packed)
    mine = (owner == rank).nonzero()[:, 1].view(rows, -1)
    row = torch.arange(rows, device=mine.device)[:, None]
    return {
        name: value[row.to(value.device), mine.to(value.device)]
        if name in TOKENWISE and value is not None
        else value
        for name, value in whole.items()
    }


def next_labels(labels: Tensor, ignored: int | None) -> Tensor:
    """The label of the token after each one, and a label that does not count after the
    last token of a row.

    Args:
        labels: `[rows, length]`.
        ignored: the label that does not count. By default a negative one of the labels,
            or -100 if there is none.
    """
    if ignored is not None or labels.is_floating_point():
        last = labels.new_full(
            (len(labels), 1), NO_TARGET if ignored is None else ignored
        )
    else:
        least = labels.amin()
        last = torch.where(least < 0, least, NO_TARGET).expand(len(labels), 1)
    return torch.cat([labels[:, 1:], last], 1)


def require_tokenwise(name: str, value: Tensor, rows: int, length: int) -> None:
    """Raises ContextError where an argument has no value for each token."""
    if name not in TOKENWISE:
        text = f"`{name}` has {list(value.shape)}: no value for each token"
        raise ContextError(text)
    fits = len(value) == rows or (name == "position_ids" and len(value) == 1)
    dims = 3 if name == "inputs_embeds" else 2
    if value.dim() != dims or not fits or value.shape[1] != length:
        text = f"in a batch of {rows} rows and {length} tokens"
        raise ContextError(f"`{name}` has {list(value.shape)}, {text}")


def owners(positions: Tensor, ranks: int, balance: str, *, packed: bool) -> Tensor:
    """The rank of each token.

    Args:
        positions: `[rows, length]`; where one does not follow, a document begins.
        ranks: how many share a sequence.
        balance: as of `ContextParallel`.
        packed: whether documents are told apart by their positions; transformers does
            not where there is a mask of padding, so there a row is one document.

    Raises:
        ContextError: a length does not divide.
    """
    length = positions.shape[1]
    index = torch.arange(length, device=positions.device).expand_as(positions)
    if balance == "none":
        require_divisible(length, ranks, "the length", ranks)
        return index * ranks // length
    start, size = torch.zeros_like(index), torch.full_like(index, length)
    if balance == "per_document" and packed:
        start, size = documents_of(positions)
    runs = 2 * ranks
    for document_length in size.unique().tolist():
        what = "the length" if document_length == length else "the length of a document"
        require_divisible(document_length, runs, what, ranks)
    run = (index - start) * runs // size
    return torch.minimum(run, runs - 1 - run)


def require_divisible(length: int, parts: int, what: str, ranks: int) -> None:
    """Raises ContextError where a length does not divide."""
    if length % parts:
        twice = "2 x " if parts > ranks else ""
        text = f"{what}, {length}, is not divisible by {twice}{ranks} ranks"
        raise ContextError(f"{text} of the context axis")


def document_numbers(positions: Tensor) -> Tensor:
    """The number of each token's document, as transformers counts: a new one begins
    where a position does not follow the one before it.
    """
    before = positions[:, :1] - 1
    return (torch.diff(positions, prepend=before, dim=-1) != 1).cumsum(-1)


def documents_of(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The start of the document of each token, and its length."""
    number = document_numbers(positions)
    index = torch.arange(positions.shape[1], device=positions.device)
    count = torch.zeros_like(number).scatter_add_(1, number, torch.ones_like(number))
    start = (count.cumsum(1) - count).gather(1, number)
    if not bool(((index - start) == positions).all()):
        raise ContextError("the first position of a document is not 0")
    return start, count.gather(1, number)


def order_of(part: Tensor, ranks: int, balance: str) -> Tensor:
    """The index in the row of each token, rank by rank, where a row is one document.

    Args:
        part: of one rank, `[rows, tokens, ...]`.
        ranks: how many share a sequence.
        balance: as of `ContextParallel`.
    """
    order = torch.arange(part.shape[1] * ranks, device=part.device)
    if balance != "none":
        first, last = order.view(2, ranks, -1)
        order = torch.cat([first, last.flip(0)], 1).flatten()
    return order


class KeyTokens:
    """The facts of the tokens of all ranks that masks need, rank by rank.

    Args:
        group: the ranks.
        balance: as of `ContextParallel`.
        positions: of this rank's tokens, `[rows, length of a part]`.
        mask: which of them are no padding, of the same shape; None for all.
    """

    def __init__(
        self, group: Any, balance: str, positions: Tensor, mask: Tensor | None
    ) -> None:
        rows, self.own = positions.shape
        self.balance = balance
        ranks = group.size()
        facts = [positions] if mask is None else [positions, mask]
        mine = torch.stack([fact.long() for fact in facts], 1).contiguous()
        gathered = mine.new_empty((ranks * rows, *mine.shape[1:]))
        all_gather(gathered, mine, group=group)
        # [rows, facts, ranks, length of a part]
        gathered = gathered.unflatten(0, (ranks, rows)).movedim(0, 2)
        self.positions = gathered[:, 0].flatten(1)
        self.padding = None if mask is None else gathered[:, 1].flatten(1).bool()
        self.order = order_of(positions, ranks, balance)
        self.documents = None
        self.places = self.order.expand(rows, -1)
        if mask is not None:
            return
        if balance == "per_document":
            # the first rank has the first token of each document
            number = (gathered[:, 0, 0] == 0).cumsum(-1)
            self.documents = number.repeat(1, ranks)
            one_by_one = self.documents * len(self.order) + self.positions
            self.places = one_by_one.argsort().argsort()
            return
        number = document_numbers(self.positions[:, self.order.argsort()])
        if bool((number[:, -1] > 0).any()):
            self.documents = number[:, self.order]

    def several(self) -> bool:
        """Whether several documents of a row are balanced one by one."""
        if self.balance != "per_document" or self.documents is None:
            return False
        return bool((self.documents != self.documents[:, :1]).any())

    def left_padding(self, part: Tensor) -> Tensor:
        """The number of padding tokens on the left of each row, from those of a
        part.
        """
        if self.padding is None:
            return part
        shown = self.padding[:, self.order.argsort()].cumsum(-1)
        return (shown == 0).sum(-1)

    def adapt_mask_function(
        self, function: Callable[..., Any], *, packed: bool
    ) -> Callable[..., Any]:
        """Adapts a mask function of transformers to indices of all ranks, rank by rank.

        Args:
            function: of the model, of indices in the sequence, or in a document where
                documents are packed.
            packed: whether the model tells documents apart.

        Returns:
            The same of indices rank by rank.
        """

        def adapted_mask(row: Any, head: Any, query: Any, key: Any) -> Any:
            number = self.documents if packed else None
            at = self.places if number is None else self.positions
            visible = function(row, head, at[row, query], at[row, key])
            if number is not None:
                visible = visible & (number[row, query] == number[row, key])
            return visible if self.padding is None else visible & self.padding[row, key]

        return adapted_mask


def of_chosen(mask: Tensor, chosen: Tensor) -> Tensor:
    """The mask without the keys that an indexer left out.

    Args:
        mask: `[rows or 1, 1, queries, keys]`, boolean or added to the scores.
        chosen: the indices of keys, `[rows, queries, number]`.
    """
    shape = (len(chosen), 1, *mask.shape[-2:])
    left = chosen.new_ones(shape, dtype=torch.bool)
    left = left.scatter(-1, chosen.long().unsqueeze(1), False)
    if mask.dtype == torch.bool:
        return mask & ~left
    return mask.masked_fill(left, torch.finfo(mask.dtype).min)
