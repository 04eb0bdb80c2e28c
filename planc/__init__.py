"""planc: a compiler for parallel training plans.

    import planc
    run = planc.apply(model, "llama", overrides=["tp=2"])

Everything is imported when it is first used, so `import planc` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planc.files.version import VERSION as __version__

if TYPE_CHECKING:
    from planc.answers.apply import apply
    from planc.answers.plan import check, diff, init, lower, verify, why
    from planc.answers.step import estimate, measure
    from planc.answers.transfer import join_transfer, transfer_table
    from planc.diagnostics.diagnostic import PlanError

__all__ = [
    "PlanError",
    "__version__",
    "apply",
    "check",
    "diff",
    "estimate",
    "init",
    "join_transfer",
    "lower",
    "measure",
    "transfer_table",
    "verify",
    "why",
]

_HOME = {
    "PlanError": "planc.diagnostics.diagnostic",
    "apply": "planc.answers.apply",
    **dict.fromkeys(("check", "diff", "init", "lower", "verify", "why"), "planc.answers.plan"),
    **dict.fromkeys(("estimate", "measure"), "planc.answers.step"),
    **dict.fromkeys(("join_transfer", "transfer_table"), "planc.answers.transfer"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planc' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
