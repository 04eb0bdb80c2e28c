"""The loss of a part of each sequence.

Emitted scripts inline these definitions without their types.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from planc.runtime.standalone.context_tokens import NO_TARGET


class PartLoss:
    """The loss of a pass, such that the mean over the ranks is the plain model's: its
    sum is divided by the number of labels that is given, or else of all ranks.

    Args:
        model: whose own `loss_function` is kept until `leave`.
        group: the ranks.
        given: the arguments of the pass, `labels` and `shift_labels` among them.
    """

    def __init__(self, model: Any, group: Any, given: Mapping[str, Any]) -> None:
        self.group, self.given = group, given
        self.function, self.called = model.loss_function, False
        model.loss_function = self

    def labels(self, name: str) -> tuple[Tensor, Tensor]:
        """The number of labels that count on this rank, and of all, for each rank."""
        own = (self.given[name] != NO_TARGET).sum()
        every = own.clone()
        distributed.all_reduce(every, group=self.group)
        return own, every / self.group.size()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.called = True
        if kwargs.get("num_items_in_batch") is None:
            taken = inspect.signature(self.function).parameters
            plain = "labels" in taken and "shift_labels" not in taken
            name = "labels" if plain else "shift_labels"
            kwargs["num_items_in_batch"] = self.labels(name)[1]
        found: Tensor = self.function(*args, **kwargs)
        return found

    def leave(self, model: Any, output: Any) -> Any:
        """The output with its loss; a model that calls no `loss_function` has taken the
        mean of this rank's labels.
        """
        model.loss_function = self.function
        if self.called or getattr(output, "loss", None) is None:
            return output
        own, share = self.labels("labels")
        output["loss"] = torch.where(own > 0, output.loss * (own / share), 0.0)
        return output
