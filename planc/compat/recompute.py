"""Activation checkpointing: the wrapper of a module, and what selective checkpointing keeps."""

from planc.compat.names import private_names, require

with private_names("torch"):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torch.utils import checkpoint

require("torch", checkpoint, "_CachingTorchDispatchMode", "_VersionWrapper", "_is_compiling")

__all__ = ["CheckpointWrapper"]
