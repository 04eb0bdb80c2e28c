"""A process group whose other ranks do not exist; its import takes long."""

from planc.compat.names import private_names

with private_names("torch"):
    from torch import _dynamo
    from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "_dynamo"]
