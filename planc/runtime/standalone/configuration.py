"""Configuration fields that training needs changed."""

from typing import Any

from torch import nn


def set_config(model: nn.Module, path: str, value: object) -> None:
    """Sets a field, as `text_config.use_cache`, in every copy that modules hold: an
    encoder and a decoder read their own, as in T5.
    """
    *owners, name = path.split(".")
    config: Any = model.config
    for owner in owners:
        config = getattr(config, owner)
    held = (getattr(module, "config", None) for module in model.modules())
    for one in (config, *held):
        if isinstance(one, type(config)):
            setattr(one, name, value)
