"""planc: a compiler for parallel training plans.

    import planc
    run = planc.apply(model, "llama", overrides=["tp=2"])

Everything is imported when it is first used, so `import planc` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planc.api import apply, check, diff, lower
    from planc.diagnostic import PlanError

__version__ = "0.1.0"
__all__ = ["PlanError", "__version__", "apply", "check", "diff", "lower"]

_HOME = {
    "apply": "planc.api",
    "check": "planc.api",
    "diff": "planc.api",
    "lower": "planc.api",
    "PlanError": "planc.diagnostic",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planc' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
