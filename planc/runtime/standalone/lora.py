"""LoRA by peft, with the same values on every rank; for plans with adapters alone."""

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from planc.runtime.standalone.lora_init import initialize_adapters, unset_adapters
from planc.runtime.standalone.tensor_styles import contiguous_gradient, contiguous_input


def inject_lora(model: nn.Module, seed: int, **config: Any) -> None:
    """Wraps layers by peft's `LoraConfig`, and freezes all but the adapters.

    Initial values depend on the seed and on the name of a layer only: ranks with some
    of the layers have those of the whole model. The random state is restored.
    """
    before = unset_adapters(model, meta=False)
    known = set(model.modules())
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(LoraConfig(**config), model)
    for name, module in model.named_modules():
        if {"lora_A", "lora_B"} & {*name.split(".")} and module not in known:
            module.register_forward_pre_hook(contiguous_input)
            module.register_forward_hook(contiguous_gradient)
    initialize_adapters(
        model,
        unset_adapters(model, meta=False) - before,
        config["target_modules"],
        rank=config["r"],
        init=config.get("init_lora_weights", True),
        seed=seed,
    )
