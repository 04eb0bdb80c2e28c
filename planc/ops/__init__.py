"""The operations of a lowered plan as data that imports no torch, one file a kind."""
