"""A small model of the same family: its configuration, its inputs, its construction."""
