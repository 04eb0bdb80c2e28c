"""`megatron_fsdp.fully_shard_model`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from planc.model.facts import Modules
from planc.ops.base import Axes, Axis, Count, Dtype, Form, Name, Op, Pairs, Some, choice
from planc.ops.fsdp import FullyShard

OPTIONS = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "report_nan_in_param_grad": False,
    "average_in_collective": False,
    "disable_bucketing": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "disable_symmetric_registration": False,
    "enable_fine_grained_param_gather": False,
    "maxpool_double_buffer": False,
}
"""The keywords of `fully_shard_model` that a plan can set, and their defaults there."""

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OUTER = ("no_shard", "optim")
_SETTABLE = Form(
    {
        "properties": {name: {"const": not default} for name, default in OPTIONS.items()},
        "additionalProperties": False,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronShard(Op):
    """`megatron_fsdp.fully_shard_model` of the whole model, one call.

    Args:
        members: the modules that are units, each by itself; the rest is sharded in no unit.
        classes: theirs, by name: what the call takes.
        shard: axes over which it shards; several are one dimension of its mesh.
        replicate: axes of `dp_outer_dim`.
        strategy, outer: `zero_dp_strategy` and `outer_dp_sharding_strategy`.
        main_params, main_grads, grad_comm: dtype names of its mixed precision policy.
        summed: `calculate_per_token_loss`: gradients are added up and not averaged.
        experts: whether there are parameters that it takes for experts by their names, for which
            it is given the same mesh again.
        options: further keywords that are not at their defaults.
        nbytes: bytes that one rank keeps at rest, the optimizer's weights among them.
        gathered: bytes of the largest unit while it is gathered.
    """

    members: Some[Modules]
    classes: Some[Name]
    shard: Some[Axis]
    replicate: Axes = ()
    strategy: Annotated[str, choice(*STRATEGIES)] = "optim_grads_params"
    outer: Annotated[str, choice(*OUTER)] = "no_shard"
    main_params: Dtype | None = "float32"
    main_grads: Dtype | None = None
    grad_comm: Dtype | None = None
    summed: bool = False
    experts: bool = False
    options: Annotated[Pairs[bool], _SETTABLE] = ()
    nbytes: Count = 0
    gathered: Count = 0

    def units(self) -> Iterator[FullyShard]:
        """Each set of units, and the root around them, as torch's own FSDP would have it."""
        whole = self.strategy == "optim_grads_params"
        for member in (*self.members, Modules((), self.members[0].module)):
            yield FullyShard(
                members=(member,),
                shard=self.shard if whole else (),
                replicate=self.replicate if whole else (*self.replicate, *self.shard),
                reshard=whole and member.path != (),
                reduce=self.grad_comm or self.main_grads,
                place=self.place,
            )
