"""`planc import`: a plan from the configuration of another library, every key accounted for."""
