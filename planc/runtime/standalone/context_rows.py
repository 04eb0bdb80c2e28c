"""Context parallelism of models that get whole rows.

Embeddings, positions and masks are those of whole rows, as the model's own code makes
them; a hook in front of the blocks leaves each rank its tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from planc.runtime.standalone.collectives import GatherSequence
from planc.runtime.standalone.context import ContextParallel, PartLoss
from planc.runtime.standalone.context_states import of_local
from planc.runtime.standalone.context_tokens import (
    NO_TARGET,
    ContextError,
    order_of,
    require_divisible,
)


class ContextOfRows(ContextParallel):
    """The state of one model; arguments are those of `ContextParallel`."""

    mine: tuple[Tensor, Tensor] | None = None
    """The rows and tokens of a pass."""

    def batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Whole rows, with this rank's part of the labels and of `shift_labels`.

        Args:
            batch: the arguments of the model.

        Raises:
            ContextError: a length does not divide.
        """
        whole = dict(batch)
        row, mine = self._local_indices(first_of(whole))
        if whole.get("labels") is not None:
            labels = whole["labels"]
            if whole.get("shift_labels") is None:
                moved = pad(labels, (0, 1), value=NO_TARGET)[:, 1:]
                whole["shift_labels"] = moved
            for name in ("labels", "shift_labels"):
                whole[name] = whole[name][row.to(labels.device), mine.to(labels.device)]
        return whole

    def _local_indices(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of this rank's tokens: rows, and tokens in these."""
        if self.balance == "per_document":
            text = "for whole rows `balance = per_document` is not known"
            raise ContextError(f"{text}: use `head_tail` or `none`")
        rows, length = ids.shape[:2]
        runs = self.size if self.balance == "none" else 2 * self.size
        require_divisible(length, runs, "the length", self.size)
        part = ids[:, : length // self.size]
        mine = order_of(part, self.size, self.balance).view(self.size, -1)[self.rank]
        row = torch.arange(rows, device=ids.device)[:, None]
        return row, mine.expand(rows, -1)

    def gather_tokens(self, part: Tensor) -> Tensor:
        """The tokens of all ranks, `[rows, tokens, ...]`, in the order of the row."""

        def gather(local: Tensor) -> Tensor:
            order = order_of(local, self.size, self.balance).argsort()
            return GatherSequence.apply(local[None], self.group)[0][:, order]

        return of_local(gather, part, 1)

    def local_tokens(self, tokens: Tensor) -> Tensor:
        """This rank's tokens of a tensor that `gather_tokens` returns."""

        def cut(local: Tensor) -> Tensor:
            part = local[:, : local.shape[1] // self.size]
            order = order_of(part, self.size, self.balance).view(self.size, -1)
            return local[:, order[self.rank]]

        return of_local(cut, tokens, 1)

    def _enter_rows(self, model: Any, given: Mapping[str, Any]) -> Tensor:
        """Notes the rows of a pass, which it returns, and what its loss is."""
        ids = first_of(given)
        self.mine = mine = self._local_indices(ids)
        self.length = ids.shape[1]
        labels = given.get("labels")
        if labels is not None:
            shifted = given.get("shift_labels")
            if shifted is None or shifted.shape != mine[1].shape:
                text = "the loss of a part of a sequence is not that of the whole"
                raise ContextError(f"labels of whole rows: {text}; use `run.batch`")
            self.loss = PartLoss(model, self.group, given)
        return ids

    def _leave(self, model: Any, args: Any, output: Any) -> Any:
        self.mine = None
        return super()._leave(model, args, output)


def first_of(given: Mapping[str, Any]) -> Tensor:
    """The argument that has the rows and tokens of a batch."""
    names = ("input_ids", "inputs_embeds")
    first = next((given[n] for n in names if given.get(n) is not None), None)
    if not isinstance(first, Tensor):
        raise ContextError("the batch has no `input_ids`")
    return first
