"""A proxy model, run: all ranks simulated in one process, or on real processes."""
