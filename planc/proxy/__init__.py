"""A proxy model of the same family: its configuration, its inputs, its construction."""
