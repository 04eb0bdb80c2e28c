"""What torch does not have: used by `apply`, and carried along, as text, by emitted scripts."""
