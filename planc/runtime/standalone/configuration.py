"""Configuration fields that training needs changed."""

from typing import Any

from torch import nn


def set_config(model: nn.Module, path: str, value: object) -> None:
    """Sets a field of a configuration, and of every copy of it that modules hold.

    An encoder and a decoder read copies of their own, as in T5.

    Args:
        model: its `config` has the field.
        path: the field, `use_cache` or `text_config.use_cache`.
        value: what it is set to.
    """
    *owners, name = path.split(".")
    config: Any = model.config
    for owner in owners:
        config = getattr(config, owner)
    held = (getattr(module, "config", None) for module in model.modules())
    for holder in (config, *held):
        if isinstance(holder, type(config)):
            setattr(holder, name, value)
