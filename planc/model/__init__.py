"""Model facts, as plain data."""
