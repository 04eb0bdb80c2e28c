"""`backend = megatron` -> the one call that shards the model."""

from dataclasses import replace

from planc.ir.nodes import Fsdp, Plan
from planc.lowering.memory import Holding, Holdings
from planc.model.facts import DTYPE_BYTES, Facts, Modules
from planc.sections.megatron_fsdp.ops import MegatronShard


def lower_shards(plan: Plan, op: MegatronShard, facts: Facts, holdings: Holdings) -> MegatronShard:
    """The operation of a section, with its units and axes."""
    section = plan.fsdp
    assert section is not None
    units = [u for u in section.units if not u.root]
    members = [m for u in units for m in u.members]
    shard = plan.mesh.wide(section.shard) or section.shard[:1]
    replicate = plan.mesh.wide(section.replicate)
    reduce = section.precision.reduce if section.precision else None
    return replace(
        op,
        members=tuple(members),
        classes=tuple(dict.fromkeys(m.module.cls for m in members)),
        shard=shard,
        replicate=replicate,
        outer=op.outer if replicate else "no_shard",
        main_grads=op.main_grads or reduce,
        grad_comm=op.grad_comm or (reduce if op.main_grads not in (None, reduce) else None),
        summed=section.divide is not None,
        # its parameters with `.experts.` in their names are experts' for megatron_fsdp
        experts=any(m.module.parameters and "experts" in m.path[1:] for m in facts.model.below()),
        nbytes=sum(len(h.modules) * _at_rest(h, op, section, plan) for h in holdings.all),
        gathered=max((_gathered_bytes(m, holdings) for m in members), default=0),
    )


def _at_rest(holding: Holding, op: MegatronShard, section: Fsdp, plan: Plan) -> int:
    """Bytes of a parameter on one rank, and of the optimizer's main weights."""
    ranks = plan.mesh.size(*section.shard)
    every = ranks * (plan.mesh.size(*section.replicate) if op.outer == "optim" else 1)
    model = holding.gathered_bytes(None)
    if op.strategy == "optim_grads_params":
        in_unit = holding.unit is not None and not holding.unit.root
        # root parameters stay gathered
        model = holding.sharded_bytes(every) + (0 if in_unit else model)
    if op.main_params is None or not holding.parameter.trainable:
        return model
    width = DTYPE_BYTES.get(holding.parameter.dtype, 4)
    main = (
        holding.gathered_bytes(None) if op.strategy == "no_shard" else holding.sharded_bytes(every)
    )
    return model + main // width * DTYPE_BYTES[op.main_params]


def _gathered_bytes(member: Modules, holdings: Holdings) -> int:
    inside = [h for h in holdings.all if h.unit and not h.unit.root and h.modules.is_within(member)]
    return sum(len(h.modules) * h.gathered_bytes(None) for h in inside) // len(member)
