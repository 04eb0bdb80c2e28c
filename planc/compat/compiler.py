"""Asynchronous tensor parallelism in torch's compiler; its import takes long."""

from planc.compat.names import private_names, require

with private_names("torch"):
    from torch._inductor import config as inductor_config
    from torch.distributed import _symmetric_memory

require("torch", inductor_config, "_micro_pipeline_tp")
require("torch", _symmetric_memory, "enable_symm_mem_for_group")

__all__ = ["_symmetric_memory", "inductor_config"]
