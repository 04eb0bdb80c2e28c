"""Checks during a run: weights and inputs of all ranks, and calls that a plan cannot follow."""
