"""`planc why`: which lines of a plan decided a module, its shards, its shapes."""
