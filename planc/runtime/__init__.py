"""Floor 5: lowered ops -> torch. The only code that calls torch's distributed API."""

from planc.runtime.agree import fresh
from planc.runtime.apply import apply_lowered

__all__ = ["apply_lowered", "fresh"]
