"""Floor 5: lowered ops -> text, Python, diff."""
