"""LoRA by peft, with the same values on every rank. Scripts inline it without types."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn


def inject_lora(model: nn.Module, seed: int, **config: Any) -> None:
    """Puts LoRA around layers, and freezes all but adapters.

    The values drawn follow from the seed, and the random state stays what it was.

    Args:
        model: changed in place.
        seed: of the adapters' first values.
        config: of peft's `LoraConfig`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(**config), model)
