"""DTensor: specs, placements, redistribution, and the styles of tensor parallelism."""

from planc.compat.names import private_names, require

with private_names("torch"):
    from torch.distributed.tensor import DTensor, Shard, _redistribute
    from torch.distributed.tensor._dispatch import ExplicitRedistributionContext
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
    from torch.distributed.tensor._redistribute import disable_redistribute_transform_optimization
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset,
        redistribute_cost,
    )
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
    from torch.distributed.tensor.placement_types import _StridedShard

require("torch", DTensor, "_op_dispatcher")
require("torch", Shard, "_split_tensor")
require("torch", ExplicitRedistributionContext, "observe_redistribution")
require("torch", _redistribute, "_gen_transform_infos", "clear_redistribute_planner_cache")
require(
    *("torch", ShardingPropagator, "_propagate_tensor_meta_non_cached"),
    "propagate_op_sharding_non_cached",
)
require("torch", ParallelStyle, "_apply")
require("torch", ColwiseParallel, "_prepare_input_fn", "_prepare_output_fn")

__all__ = [
    "ColwiseParallel",
    "DTensorSpec",
    "ExplicitRedistributionContext",
    "OpSchema",
    "OutputSharding",
    "ParallelStyle",
    "ShardingPropagator",
    "_StridedShard",
    "_redistribute",
    "compute_local_shape_and_global_offset",
    "disable_redistribute_transform_optimization",
    "redistribute_cost",
]
