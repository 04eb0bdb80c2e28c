"""Model sources: each builds a model on the meta device."""
