"""Packages whose kernels run on GPUs alone.

transformers calls them in the place of its own functions wherever they can be imported, whatever
device a tensor is on: a proxy model on a CPU would not run.
"""

import sys
from importlib.util import find_spec
from typing import Any

PACKAGES = ("causal_conv1d", "fla", "mamba_ssm")


def run_on(device: str) -> bool:
    """Whether models call some of them on a device of this machine."""
    return device == "cuda" and any(find_spec(name) is not None for name in PACKAGES)


def hide() -> None:
    """Lets this process import none of them; for one that runs models on CPUs alone, before it
    imports one's code.
    """
    modules: dict[str, Any] = sys.modules
    for name in PACKAGES:
        modules.setdefault(name, None)
