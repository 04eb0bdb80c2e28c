"""Lowered ops -> text, Python, diff."""
