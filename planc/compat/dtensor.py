"""DTensor: specs, placements, redistribution, and the styles of tensor parallelism."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
require("torch", OpSchema, "args_spec")
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
    "reading_specs_once",
    "redistribute_cost",
]


@contextmanager
def reading_specs_once() -> Iterator[None]:
    """Each call of an operator lists the specs of its arguments once, until the end of the block.

    torch flattens the arguments again for each tensor of a list, which takes seconds for the
    operators of an optimizer on the list of all parameters.
    """
    compute = OpSchema.args_spec.fget

    def args_spec(schema: Any) -> tuple[DTensorSpec, ...]:
        specs: tuple[DTensorSpec, ...]
        arguments, specs = schema.__dict__.get("_planc_specs", (None, ()))
        if arguments is not schema.args_schema:
            specs = compute(schema)
            schema.__dict__["_planc_specs"] = schema.args_schema, specs
        return specs

    with mock.patch.object(OpSchema, "args_spec", property(args_spec)):
        yield
