"""Floor 8: a first plan for a model, from what its modules are for, proved as it goes."""
