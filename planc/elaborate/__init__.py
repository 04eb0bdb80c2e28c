"""AST + model facts -> what a plan means for one model. Imports no torch."""

from planc.elaborate.elaborate import elaborate

__all__ = ["elaborate"]
