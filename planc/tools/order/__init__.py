"""The order in which ranks call their collectives, whether it fits, and where a run hangs in it."""
