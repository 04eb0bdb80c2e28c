"""Lowered operations -> text, Python."""
