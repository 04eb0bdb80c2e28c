"""Lowered ops -> torch. The only code that calls torch's distributed API."""
