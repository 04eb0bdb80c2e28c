"""The files of torch.distributed.checkpoint."""

from planc.compat.names import private_names

with private_names("torch"):
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix

__all__ = ["_StorageInfo", "_StoragePrefix", "flatten_state_dict"]
