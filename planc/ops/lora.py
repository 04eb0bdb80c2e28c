"""LoRA adapters, by peft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from planc.model.facts import Modules
from planc.ops.base import Count, Dtype, Form, Op, Positive, Size, Some, choice
from planc.ops.peft_pattern import pattern_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapt(Op):
    """peft's `inject_adapter_in_model` with one `LoraConfig`; all but adapters is frozen.

    Args:
        members: the layers of one rule.
        rank, alpha, dropout: the configuration's `r`, `lora_alpha` and `lora_dropout`.
        dtype: what A and B are cast to, None where they keep that of their layer.
        init: `default`, `gaussian` or `random`, peft's `init_lora_weights`.
        seed: of their first values, so that every rank has the same.
    """

    members: Some[Modules]
    rank: Size
    alpha: Positive
    dropout: Annotated[float, Form({"minimum": 0, "exclusiveMaximum": 1})] = 0.0
    dtype: Dtype | None = None
    init: Annotated[str, choice("default", "gaussian", "random")] = "default"
    seed: Count = 0

    @property
    def pattern(self) -> str:
        """The regular expression that peft finds these layers by, and no others."""
        return pattern_of(self.members)

    def names(self) -> Iterator[str]:
        """The torch names of all layers."""
        return (name for members in self.members for name in members.names())
