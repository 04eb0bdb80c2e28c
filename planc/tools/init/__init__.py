"""A first plan for a model, from what its modules are for, proved as it goes."""
