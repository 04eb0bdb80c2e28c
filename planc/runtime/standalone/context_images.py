"""Context parallelism of models that put features of images among embeddings.

Images take the places of tokens in whole rows, so each rank embeds whole rows and runs
the tower on all their images; a hook in front of the language model leaves it the
rank's tokens. Positions of images, and masks that the code around the language model
makes, are those of whole rows.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planc.runtime.standalone.context import CONTEXT
from planc.runtime.standalone.context_rows import ContextOfRows
from planc.runtime.standalone.context_tokens import ContextError, KeyTokens
from planc.runtime.standalone.pipeline_images import DEEPSTACK, DEEPSTACK_PLACES


class ContextBehindImages(ContextOfRows):
    """The state of one model; other arguments are those of `ContextParallel`.

    Args:
        holder: the name of the module that puts features among embeddings, and then
            calls its `language_model`.
    """

    def __init__(
        self, model: nn.Module, *args: Any, holder: str, **settings: Any
    ) -> None:
        self.holder: Any = model.get_submodule(holder)
        super().__init__(model, *args, **settings)
        self.holder.language_model.register_forward_pre_hook(
            self._cut, with_kwargs=True
        )

    def prepare(self, model: nn.Module) -> None:
        """The towers keep their attention; the code around the language model makes
        masks by the configuration of this.
        """
        text = self.holder.language_model
        super().prepare(text)
        for outer in {model, self.holder}:
            outer.__dict__[CONTEXT] = self
            outer.config = copy.copy(outer.config)
            outer.config.text_config = text.config

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = self._arguments(args, kwargs)
        ids = self._enter_rows(model, given)
        mine = self.mine
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if positions is not None and len(positions) == 4 and positions.dim() == 3:
            # of the text, beside those of time, height and width
            positions = positions[0]
        if positions is None or positions.dim() == 3:
            positions = torch.arange(self.length)[None]
        positions = positions.expand(len(ids), -1).to(ids.device)[mine]
        mask = mask[mine] if isinstance(mask, Tensor) else None
        tokens = KeyTokens(self.group, self.balance, positions, mask)
        return args, self._begin(model, tokens, kwargs)

    def _cut(self, _text: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """This rank's tokens of all that the language model gets."""
        if args or self.mine is None:
            raise ContextError("the language model is called otherwise than in a pass")
        found = {n: self._part(value) for n, value in kwargs.items()}
        if kwargs.get("position_ids") is None:
            found["position_ids"] = self.mine[1]
        seen = kwargs.get(DEEPSTACK_PLACES)
        if seen is not None:
            number = (seen.flatten().cumsum(0) - 1).view(seen.shape)
            wanted = number[self.mine][found[DEEPSTACK_PLACES]]
            found[DEEPSTACK] = [each[wanted] for each in kwargs[DEEPSTACK]]
        return args, found

    def _part(self, value: Any) -> Any:
        """The own tokens of a value of whole rows, or of positions in several dims."""
        assert self.mine is not None
        whole = (len(self.mine[0]), self.length)
        if not isinstance(value, Tensor):
            return value
        if value.dim() > 1 and value.shape[1] == self.length and len(value) == 1:
            value = value.expand(whole[0], *value.shape[1:])
        if value.shape[:2] == whole:
            return value[self.mine]
        if value.dim() == 3 and value.shape[1:] == whole:
            return value[:, self.mine[0], self.mine[1]]
        return value

    def mask(self, q_length: int, kv_length: int, arguments: dict[str, Any]) -> Any:
        """The mask as of `ContextParallel`. A mask of full rows is made before they are
        sharded, by functions that look up images by the indices of tokens.
        """
        if q_length == kv_length == self.length and self.tokens is not None:
            q_length = kv_length = self.tokens.own
        return super().mask(q_length, kv_length, {**arguments, "use_vmap": False})


def context_behind_images(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    """`ContextBehindImages` with its other arguments; then
    `model.context_parallel.batch(batch)` is a rank's part of a batch.
    """
    ContextBehindImages(model, mesh, **settings)
