"""peft: the layer that DoRA wraps."""

from planc.compat.names import private_names

with private_names("peft"):
    from peft.tuners.lora.dora import DoraLinearLayer

__all__ = ["DoraLinearLayer"]
