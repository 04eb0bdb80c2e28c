"""A lowered plan as Python that needs no planc."""
