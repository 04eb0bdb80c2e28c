"""What test_experts.py runs on every rank: experts that the tensor ranks share."""

import numerics
import torch
import transformers
import unit_jobs
from loading_jobs import fresh
from saving_jobs import made as optimizer_of
from saving_jobs import steps
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from training_jobs import applied, mine
from unit_jobs import along, place

import planc
from planc.ops.fsdp import Divide


def judge(model, path, hand=None, overrides=(), changes=None):
    """`unit_jobs.judge`, with a function of this file to spread the model by hand."""
    unit_jobs.hand = globals().get(hand)
    way = "hand" if hand else None
    return unit_jobs.judge(model, path, way, overrides=overrides, changes=changes)


def shares(model, path, overrides=(), changes=None):
    """The numbers of a parameter that this rank holds, and all of them; by plain name."""
    run = applied(model, path, overrides, changes)
    return {
        unit_jobs.plain(n): ((p.to_local() if isinstance(p, DTensor) else p).numel(), p.numel())
        for n, p in run.model.named_parameters()
    }


def resumed(model, old, new, folder, overrides=()):
    """Losses of four steps without a break, and of two and two with another plan between."""
    run = applied(model, old, overrides)
    right = steps(run, optimizer_of(run), 0, 4)
    run = applied(model, old, overrides)
    optimizer = optimizer_of(run)
    losses = steps(run, optimizer, 0, 2)
    run.save(folder, optimizer=optimizer, step=2)
    distributed.barrier()
    before = run.full_state_dict(every_rank=True)
    run = fresh(model, new, overrides)
    optimizer = optimizer_of(run)
    step = run.load(folder, optimizer=optimizer)
    after = run.full_state_dict(every_rank=True)
    equal = all(torch.equal(before[n], after[n]) for n in before)
    return {"right": right, "losses": losses + steps(run, optimizer, step, 4), "equal": equal}


def divided(model, path, by):
    """How far gradients are from those of the single process over a number, the worst of them."""
    far = {}
    single = numerics.build(model)
    right = unit_jobs.train(single, 0, 1, 1)
    for way in ("applied", "script", "forgotten"):
        made = numerics.build(model)
        lowered = planc.lower(made, path, world_size=distributed.get_world_size())
        if way == "forgotten":
            lowered = lowered.map_ops(
                lambda ops: (o for o in ops if not (isinstance(o, Divide) and o.units))
            )
        spread = numerics.by_script if way == "script" else numerics.by_planc
        seen = unit_jobs.train(made, *spread(made, lowered), 1)
        names = [n for n in right if n.startswith("gradient")]
        far[way] = max(numerics.error(seen[n], right[n] / by, 1e-3) for n in names)
    return far


def export(model, path, folder):
    """Whether transformers reads bit for bit what was trained for a step; and the logits."""
    run = applied(model, path, ())
    steps(run, torch.optim.SGD(run.model.parameters(), lr=0.1), 0, 1)
    run.export(folder)
    right = run.full_state_dict(every_rank=True)
    read, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    got = read.state_dict()
    rows = mine(run, numerics.data(run.model.config.vocab_size)[0])[0]
    with torch.no_grad():
        logits, theirs = run.model(input_ids=rows).logits, read(input_ids=rows).logits
    return {
        "different": [n for n in right if n not in got or not torch.equal(got[n], right[n])],
        "problems": [k for k, v in info.items() if v],
        "error": numerics.error(logits, theirs),
    }


def meshes(path, names):
    """Sizes of dimensions of a run by name, and the data rank and size, and the rank in `dp`."""
    run = applied("llama", path, ())
    sizes = {name: run.meshes[name].size() for name in names}
    return sizes, (run.data_rank, run.data_size, run.meshes["dp"].get_local_rank())


# By hand -----------------------------------------------------------------------------------------


def split(model, tensor):
    for block in model.model.layers:
        plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
        parallelize_module(block, tensor, {**plan, "self_attn.o_proj": RowwiseParallel()})


def shared(model, dim=0):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    split(model, mesh["tp"])
    both = mesh["dp_shard", "tp"]._flatten("dp_shard_tp")
    own = {"shard_placement_fn": along(dim, 4)} if dim else {}
    for block in model.model.layers:
        fully_shard(block.mlp.experts, mesh=both, reshard_after_forward=True, **own)
        fully_shard(block, mesh=mesh["dp_shard"], reshard_after_forward=True)
    fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=False)
    return place(mesh, "dp_shard")


def shared_along_one(model):
    return shared(model, dim=1)


def within(model, dim=0):
    """One unit a block, which gathers over two meshes (torchtitan's way with experts)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    split(model, mesh["tp"])
    info = FSDPMeshInfo(mesh["dp_shard", "tp"]._flatten("dp_shard_tp"), shard_mesh_dim=0)
    for block in model.model.layers:
        own = set(block.mlp.experts.parameters())
        where = ShardPlacementResult(Shard(dim), info)
        fully_shard(
            block,
            mesh=mesh["dp_shard"],
            reshard_after_forward=True,
            shard_placement_fn=lambda p, own=own, where=where: where if p in own else None,
        )
    fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=False)
    return place(mesh, "dp_shard")


def within_along_one(model):
    return within(model, dim=1)


IDENTITIES = dict(
    model_type="longcat_flash",
    vocab_size=96,
    hidden_size=64,
    ffn_hidden_size=96,
    expert_ffn_hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=4,
    zero_expert_num=4,
    moe_topk=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    head_dim=16,
)
"""Half of the experts give back their input, so that two tokens may reach no weight."""


def no_expert_weight(path, overrides=()):
    """Errors of the loss, the norm and each gradient, for a batch of which the row of one data
    rank uses no weight of the experts of some layer, and that of another does; and both numbers.
    """
    run = planc.apply(numerics.build_values(IDENTITIES), path, overrides=overrides)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, 96, (run.data_size, 2), generator=generator)
        unused = []
        for row in ids.split(1):
            one = numerics.build_values(IDENTITIES)
            one(input_ids=row, labels=row).loss.backward()
            weights = (p for name, p in one.named_parameters() if "gate_up_proj" in name)
            unused.append(tuple(p.grad is None for p in weights))
        if len(set(unused)) > 1 and not any(all(at) for at in zip(*unused, strict=True)):
            break
    one = numerics.build_values(IDENTITIES)
    right = one(input_ids=ids, labels=ids).loss
    right.backward()
    row = ids[run.data_rank : run.data_rank + 1]
    loss = run.forward_backward([{"input_ids": row, "labels": row}])
    made = numerics.gradients_of(run.model)
    errors = {n: numerics.error(made[n], g) for n, g in numerics.gradients_of(one).items()}
    errors["loss"] = numerics.error(loss, right.detach())
    return {"errors": errors, "unused": unused}
