"""Weights: how they come in, are saved, resumed and exported."""
