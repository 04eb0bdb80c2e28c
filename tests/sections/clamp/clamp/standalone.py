"""A hook on modules."""

from typing import Any

from torch import nn


def clamp(module: nn.Module, most: float) -> None:
    """Keeps the outputs of a module between two values."""

    def clamped(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output.clamp(-most, most)

    module.register_forward_hook(clamped)
