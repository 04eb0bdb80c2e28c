"""FSDP2: the state of a unit, its parameter groups and their parameters."""

from planc.compat.names import private_names, require, require_assigned

with private_names("torch"):
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

require("torch", FSDPModule, "_get_fsdp_state")
require("torch", _fsdp_common, "HSDPMeshInfo", "ShardPlacementResult")
require("torch", _fsdp_param_group, "RegisterPostBackwardFunction")
require("torch", TrainingState, "FORWARD", "IDLE", "PRE_BACKWARD")
require("torch", FSDPParam, "_setattr_on_modules")
require("torch", FSDPParamGroup, "is_sharded", "is_unsharded")
require("torch", FSDPParamGroup, "post_backward", "pre_backward", "pre_forward")
require(
    *("torch", FSDPState, "_lazy_init", "_pre_forward", "_post_forward"),
    "_root_post_backward_final_callback",
)
require_assigned("torch", FSDPMeshInfo, "shard_mesh_size")
require_assigned("torch", FSDPState, "_auto_reshard_after_forward", "_fsdp_param_groups")
require_assigned("torch", FSDPState, "_is_root", "_training_state")
require_assigned(
    *("torch", FSDPParamGroup, "_all_reduce_hook", "force_sum_reduction_for_comms"),
    *("fsdp_params", "gradient_divide_factor", "mesh_info", "post_forward_mesh_info"),
    "reduce_grads",
)
require_assigned(
    *("torch", FSDPParam, "_module_info", "_unsharded_param", "sharded_param"),
    "unsharded_accumulated_grad",
)

__all__ = ["FSDPModule", "FSDPState", "TrainingState", "_fsdp_common", "_fsdp_param_group"]
