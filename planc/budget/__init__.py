"""Selects the calls of checkpointed modules whose results are saved within a budget of bytes."""
