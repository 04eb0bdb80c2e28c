"""AST + model facts -> what a plan means. Imports no torch."""

from planc.plan.elaborate import elaborate

__all__ = ["elaborate"]
