"""What checkpointed modules keep within a budget of bytes: which of their calls are saved."""
