"""Image features for blocks of later stages, which are sent with the hidden states.

Some models add features of images to what each of their first blocks returns. The first
stage has them as `[places of images, width]`; it sends those that later stages add,
scattered into whole rows, `[rows, length, width]`, so that all microbatches send the
same shape.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

DEEPSTACK = "deepstack_visual_embeds"
"""The argument of the language model with the added features, a tensor for each
block."""
DEEPSTACK_PLACES = "visual_pos_masks"
"""The argument with the mask of the tokens to which they are added, `[rows,
length]`."""


class SentFeatures:
    """The state of one rank.

    Args:
        text: the language model.
        bounds: the first block of each stage.
        count: of the first blocks after which something is added.
    """

    def __init__(self, text: nn.Module, bounds: Sequence[int], count: int) -> None:
        self.bounds, self.count = bounds, count
        self.stage = 0
        self.dense: list[Tensor] = []  # for this stage's blocks and those of later ones
        text.register_forward_pre_hook(self._pass_features, with_kwargs=True)

    def split_received(self, received: Tensor | None, stage: int) -> Tensor | None:
        """The hidden states of what a stage receives; it keeps what blocks add."""
        self.stage = stage
        self.dense = []
        left = self.count - self.bounds[stage]
        if received is None or left <= 0:
            return received
        hidden, *self.dense = received.chunk(1 + left, -1)
        return hidden

    def append_features(self, output: Tensor) -> Tensor:
        """The hidden states that a stage sends, with what later stages add."""
        left = self.count - self.bounds[self.stage + 1]
        if left <= 0:
            return output
        nothing = [torch.zeros_like(output)] * left
        return torch.cat([output, *(self.dense[-left:] or nothing)], -1)

    def _pass_features(
        self, _text: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Before the language model: what its blocks add, on the first stage from the
        tower, on others as it came.
        """
        whole, found = kwargs["inputs_embeds"], kwargs.get(DEEPSTACK)
        if self.stage == 0 and found is not None:
            self.dense = self.dense_of(whole, kwargs[DEEPSTACK_PLACES], found)
        elif self.dense:
            rows = [torch.zeros_like(self.dense[0])] * self.bounds[self.stage]
            every = [each.flatten(0, 1) for each in (*rows, *self.dense)]
            ones = torch.ones(whole.shape[:2], dtype=torch.bool, device=whole.device)
            kwargs = {**kwargs, DEEPSTACK: every, DEEPSTACK_PLACES: ones}
        return args, kwargs

    def dense_of(
        self, whole: Tensor, places: Tensor, found: Sequence[Tensor]
    ) -> list[Tensor]:
        """Scatters the added features into full rows, which are zero outside of
        images.
        """
        rows = torch.zeros_like(whole)
        return [
            rows.masked_scatter(places[..., None], each.to(whole.dtype))
            for each in found
        ]
