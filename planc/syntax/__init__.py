"""Text -> AST. The grammar is `grammars/plan.lark`; this package imports no torch."""
