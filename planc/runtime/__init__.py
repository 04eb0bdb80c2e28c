"""Lowered ops -> torch. The only code that calls torch's distributed API.

Modules that need torch are imported on first use, because the command of a proof and its
certificates do not need them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planc.runtime.executor import apply_lowered
    from planc.runtime.preconditions import fresh

__all__ = ["apply_lowered", "fresh"]


def __getattr__(name: str) -> Any:
    match name:
        case "fresh":
            from planc.runtime.preconditions import fresh

            return fresh
        case "apply_lowered":
            from planc.runtime.executor import apply_lowered

            return apply_lowered
    raise AttributeError(f"module 'planc.runtime' has no attribute {name!r}")
