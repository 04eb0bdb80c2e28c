"""`planc fmt`: the canonical layout of a plan."""
