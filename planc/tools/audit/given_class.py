"""A model class under development, with a tiny configuration, as the audit builds it."""

import copy
from typing import Any

from torch import nn

from planc.proxy.input_search import BatchShape
from planc.proxy.transformers_model import seed_cpu, spread_weights


class ClassBuilder:
    """Builds a class of transformers, or one with the same base class, from a configuration.

    Args:
        cls: a language model with a head, whose forward has `input_ids` and `labels`.
        config: a tiny configuration, without dropout.
    """

    def __init__(self, cls: type[nn.Module], config: Any) -> None:
        self._cls, self._config = cls, config

    def build(self, seed: int) -> nn.Module:
        """The model on the CPU in float32, training, with eager attention, by the seed alone."""
        seed_cpu(seed)
        owner: Any = self._cls
        model: nn.Module = owner._from_config(
            copy.deepcopy(self._config), attn_implementation="eager"
        )
        spread_weights(model, seed + 1)
        return model.float().train()

    def sample(self, shape: BatchShape | None = None) -> dict[str, Any]:
        """Token ids and labels, [rows, length]."""
        text = self._config.get_text_config(decoder=True)
        return (shape or BatchShape()).text(int(text.vocab_size))
