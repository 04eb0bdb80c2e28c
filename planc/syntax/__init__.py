"""Text -> AST. The grammar is `grammars/plan.lark`; this package imports no torch."""

from planc.syntax.parse import parse

__all__ = ["parse"]
