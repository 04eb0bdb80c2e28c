"""AST + model facts -> what a plan means for one model. Imports no torch."""

from planc.plan.elaborate import elaborate

__all__ = ["elaborate"]
