"""LoRA by peft, with the same values on every rank. Scripts inline it without types."""

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn


def inject_lora(model: nn.Module, seed: int, **config: Any) -> None:
    """Wraps layers in LoRA layers, and freezes all parameters but the adapters.

    Initial values depend on the seed only, and the random state is restored.

    Args:
        model: changed in place.
        seed: the seed of the adapters' initial values.
        config: the arguments of peft's `LoraConfig`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(**config), model)
