"""A small model, run: all ranks simulated in one process, or on real processes."""
