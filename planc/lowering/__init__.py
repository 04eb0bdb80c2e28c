"""IR -> ordered torch calls, as data."""

from planc.lowering.lower import lower

__all__ = ["lower"]
