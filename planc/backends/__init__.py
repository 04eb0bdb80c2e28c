"""Backends that come with planc: libraries that shard the whole model in the place of FSDP2."""
