"""Lowered ops -> torch. The only code that calls torch's distributed API.

Modules that need torch are imported on first use, because the command of a proof and its
certificates do not need them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planc.runtime.executor import apply_lowered
    from planc.runtime.meshes import device_of
    from planc.runtime.preconditions import announce, require_not_parallel

__all__ = ["announce", "apply_lowered", "device_of", "require_not_parallel"]


def __getattr__(name: str) -> Any:
    match name:
        case "announce" | "require_not_parallel":
            from planc.runtime import preconditions

            return getattr(preconditions, name)
        case "device_of":
            from planc.runtime.meshes import device_of

            return device_of
        case "apply_lowered":
            from planc.runtime.executor import apply_lowered

            return apply_lowered
    raise AttributeError(f"module 'planc.runtime' has no attribute {name!r}")
