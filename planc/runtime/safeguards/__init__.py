"""What a run watches: weights and inputs of all ranks, and calls that a plan cannot follow."""
