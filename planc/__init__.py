"""planc: a compiler for parallel training plans.

    import planc
    run = planc.apply(model, "llama", overrides=["tp=2"])

Everything is imported when it is first used, so `import planc` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planc.files.version import VERSION as __version__

if TYPE_CHECKING:
    from planc.answers.apply import apply, check, diff, lower
    from planc.answers.estimate import estimate, init, measure, verify, why
    from planc.diagnostics.diagnostic import PlanError

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
    **dict.fromkeys(("apply", "check", "diff", "lower"), "planc.answers.apply"),
    **dict.fromkeys(("estimate", "init", "measure", "verify", "why"), "planc.answers.estimate"),
    "PlanError": "planc.diagnostics.diagnostic",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planc' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
