"""Floor 1: model facts, as plain data."""
