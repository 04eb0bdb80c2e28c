"""planc: a compiler for parallel training plans.

    import planc
    run = planc.apply(model, "llama", overrides=["tp=2"])

Everything is imported when it is first used, so `import planc` costs nothing.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from planc.version import VERSION as __version__

if TYPE_CHECKING:
    from planc.api import apply, check, diff, lower
    from planc.diagnostic import PlanError
    from planc.questions import estimate, init, measure, verify, why

__all__ = [
    "PlanError",
    "__version__",
    "apply",
    "check",
    "diff",
    "estimate",
    "init",
    "lower",
    "measure",
    "verify",
    "why",
]

_HOME = {
    **dict.fromkeys(("apply", "check", "diff", "lower"), "planc.api"),
    **dict.fromkeys(("estimate", "init", "measure", "verify", "why"), "planc.questions"),
    "PlanError": "planc.diagnostic",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planc' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


class _Package(ModuleType):
    """`planc.estimate` and `planc.measure` are functions: importing the packages of these names
    would replace them.
    """

    @property
    def estimate(self) -> Any:
        return __getattr__("estimate")

    @estimate.setter
    def estimate(self, _: ModuleType) -> None:
        pass

    @property
    def measure(self) -> Any:
        return __getattr__("measure")

    @measure.setter
    def measure(self, _: ModuleType) -> None:
        pass

    def __reduce__(self) -> tuple[Any, ...]:
        """Names the package, as cloudpickle does of plain modules, for functions that use it."""
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
