"""Megatron-FSDP in the emitted script: a mesh of its own, its policy, and the one call."""

from __future__ import annotations

from collections.abc import Iterator

from planc.emit.python.module_loops import IN, Lines
from planc.emit.python.printer import Group, lay, quoted, remark
from planc.lowering.megatron_mesh import layout
from planc.ops.lowered import Lowered
from planc.ops.megatron_fsdp import MegatronShard


def shard(op: MegatronShard, lowered: Lowered) -> Lines:
    """The body of the stage."""
    names, sizes, order = layout(op, lowered)
    turned = f".permute({', '.join(map(str, order))})" if list(order) != sorted(order) else ""
    yield from lay("# a mesh of its own, with the tensor dimension that the package asks for", IN)
    ranks = f"mesh.mesh{turned}.reshape({', '.join(map(str, sizes))})"
    yield from lay(f"ranks = {ranks}", IN)
    shown = ", ".join(map(quoted, names))
    data = Group("data = DeviceMesh(", ("mesh.device_type", "ranks", f"mesh_dim_names=({shown})"))
    yield from lay(data, IN)
    policy = (
        f"{name}_dtype={'None' if value is None else f'torch.{value}'}"
        for name, value in (
            ("main_params", op.main_params),
            ("main_grads", op.main_grads),
            ("grad_comm", op.grad_comm),
        )
    )
    yield from lay(Group("policy = megatron_fsdp.MixedPrecisionPolicy(", tuple(policy)), IN)
    if op.replicate:
        pair = f"data[{quoted(names[0])}, {quoted(names[1])}]"
        yield from lay(f'hybrid = {pair}._flatten("hybrid").get_group()', IN)
    call = Group("wrapped = megatron_fsdp.fully_shard_model(", tuple(_keywords(op, names)))
    yield from lay(call, IN, note=remark(op.place))
    yield f"{IN}in_place(model, wrapped)"


def _keywords(op: MegatronShard, names: tuple[str, ...]) -> Iterator[str]:
    yield "module=model"
    yield "device_mesh=data"
    yield f"dp_shard_dim={quoted(names[-2])}"
    if op.replicate:
        yield f"dp_outer_dim={quoted(names[0])}"
        yield "hybrid_fsdp_group=hybrid"
    yield f"tp_dim={quoted(names[-1])}"
    if op.experts:
        yield "expt_device_mesh=data"
        if op.replicate:
            yield "hybrid_fsdp_expt_group=hybrid"
    yield f"fsdp_unit_modules=unit_classes(model, [{', '.join(map(quoted, op.classes))}])"
    yield f"zero_dp_strategy={quoted(op.strategy)}"
    yield f"outer_dp_sharding_strategy={quoted(op.outer)}"
    yield "device=torch.device(mesh.device_type, torch.cuda.current_device())"
    yield "mixed_precision_policy=policy"
    if op.summed:
        yield "calculate_per_token_loss=True"
    for name, value in op.options:
        yield f"{name}={value}"
