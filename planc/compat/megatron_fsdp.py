"""Megatron-FSDP: the parameters that its wrapper puts in place."""

from planc.compat.names import private_names, require

with private_names("megatron-fsdp"):
    from megatron_fsdp import MegatronFSDP
    from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

require(
    *("megatron-fsdp", MegatronFSDP, "_replace_param_with_distributed_if_needed"),
    "_replace_param_with_raw_if_needed",
)

__all__ = ["update_uneven_dtensor_chunk_metadata"]
