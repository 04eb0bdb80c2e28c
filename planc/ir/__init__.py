"""A plan as data for one model and mesh, and queries on it. Imports no torch."""
