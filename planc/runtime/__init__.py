"""Lowered ops -> torch. The only code that calls torch's distributed API.

Modules that need torch are imported on first use, because the command of a proof and its
certificates do not need them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planc.runtime.executor import apply_lowered
    from planc.runtime.preconditions import require_not_parallel

__all__ = ["apply_lowered", "require_not_parallel"]


def __getattr__(name: str) -> Any:
    match name:
        case "require_not_parallel":
            from planc.runtime.preconditions import require_not_parallel

            return require_not_parallel
        case "apply_lowered":
            from planc.runtime.executor import apply_lowered

            return apply_lowered
    raise AttributeError(f"module 'planc.runtime' has no attribute {name!r}")
