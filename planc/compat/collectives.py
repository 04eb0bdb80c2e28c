"""Collectives as functions, and the groups and the recorder of a process."""

from planc.compat.names import private_names, require

with private_names("torch"):
    from torch._C import _distributed_c10d
    from torch.distributed import _functional_collectives, distributed_c10d
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

require("torch", _distributed_c10d, "_dump_fr_trace")
require("torch", _functional_collectives, "_maybe_wrap_tensor")
require("torch", distributed_c10d, "_resolve_process_group", "_world")

__all__ = [
    "AsyncCollectiveTensor",
    "_distributed_c10d",
    "_functional_collectives",
    "distributed_c10d",
]
