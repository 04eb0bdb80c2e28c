"""Floor 8: a first plan for a model, written from what its modules are for and proved as it goes."""
