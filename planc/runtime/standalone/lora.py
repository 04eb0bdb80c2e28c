"""LoRA by peft, with the same values on every rank; for plans with adapters alone."""

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn


def inject_lora(model: nn.Module, seed: int, **config: Any) -> None:
    """Wraps layers by peft's `LoraConfig`, and freezes all but the adapters.

    Initial values depend on the seed only, and the random state is restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(**config), model)
