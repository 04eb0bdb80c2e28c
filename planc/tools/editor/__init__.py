"""`planc lsp`: the compiler behind an editor. Nothing is proved, and no model's code is run."""
