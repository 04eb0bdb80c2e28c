"""Tools that use the compiler, which knows none of them but the times of stages."""
