"""What torch does not have: `apply` calls it, and emitted scripts inline its text."""
