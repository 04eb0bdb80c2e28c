"""Floor 2: AST + model facts -> what a plan means. Imports no torch."""

from planc.ir.elaborate import elaborate

__all__ = ["elaborate"]
