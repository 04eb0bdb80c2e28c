"""planc: a compiler for parallel training plans."""
