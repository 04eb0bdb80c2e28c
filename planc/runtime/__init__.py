"""Floor 5: lowered ops -> torch. The only code that calls torch's distributed API.

What needs torch is imported when it is first used: a proof's command and its certificates don't.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planc.runtime.agree import fresh
    from planc.runtime.apply import apply_lowered

__all__ = ["apply_lowered", "fresh"]


def __getattr__(name: str) -> Any:
    match name:
        case "fresh":
            from planc.runtime.agree import fresh

            return fresh
        case "apply_lowered":
            from planc.runtime.apply import apply_lowered

            return apply_lowered
    raise AttributeError(f"module 'planc.runtime' has no attribute {name!r}")
