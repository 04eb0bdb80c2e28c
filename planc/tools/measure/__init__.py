"""One rank of a plan, run on fake tensors: the bytes that it holds, counted, not estimated."""
