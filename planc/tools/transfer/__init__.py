"""The table by which weights of a training plan reach the ranks of a serving engine."""
