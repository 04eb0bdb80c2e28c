"""What test_units.py runs on every rank: a plan, its script, and the same by hand."""

import numerics
import torch
from loading_jobs import fresh
from numerics import BATCH, build, data, error, plain, whole
from saving_jobs import made as optimizer_of
from saving_jobs import steps
from torch import distributed
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from training_jobs import applied

import planc


def judge(model, path, hand=None, overrides=(), changes=None, steps=2):
    """A plan file beside the single process, its emitted script and torch by hand.

    Args:
        hand: a function here that spreads the model; it gives the data rank and size.

    Returns:
        `errors` by name, of logits, loss, the worst gradient and the worst weight after the steps;
        and `applied`, `script`, `hand`: the layouts, and a digest of all numbers of this rank.
    """
    changes = changes or {}
    single = build(model, **changes)
    frozen = set()
    bits, errors = {}, {}
    for way in ("applied", "script", "hand"):
        if way == "hand" and hand is None:
            continue
        made = build(model, **changes)
        lowered = planc.lower(
            made, path, world_size=distributed.get_world_size(), overrides=overrides
        )
        spread = {"applied": numerics.by_planc, "script": numerics.by_script}.get(way)
        rank, size = spread(made, lowered) if spread else globals()[hand](made)
        if way == "applied":
            frozen = {plain(n) for n, p in made.named_parameters() if not p.requires_grad}
            for name, parameter in single.named_parameters():
                parameter.requires_grad_(name not in frozen)
        seen = train(made, rank, size, steps)
        bits[way] = (layout(made), numerics.bits(*seen.values()))
        if way == "applied":
            right = train(single, 0, 1, steps, rows=(rank, size))
            assert seen.keys() == right.keys(), seen.keys() ^ right.keys()
            errors = {n: error(t, right[n], _least(n, right)) for n, t in seen.items()}
    worst = max(errors, key=errors.get)
    return {"worst": worst, "error": errors[worst], "frozen": sorted(frozen), **bits}


def layout(model):
    """Where parameters lie and what FSDP was told: numbers alone don't show a whole parameter."""
    lies = {}
    for name, parameter in model.named_parameters():
        spread = isinstance(parameter, DTensor)
        part = parameter.to_local() if spread else parameter
        lies[plain(name)] = (str(parameter.placements) if spread else "", tuple(part.shape))
    told = {}
    for name, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            ahead = (
                len(state._states_to_forward_prefetch),
                len(state._states_to_backward_prefetch),
            )
            told[plain(name)] = [type(unit).__mro__[1].__name__, ahead]
            for group in state._fsdp_param_groups:
                after = group.post_forward_mesh_info
                told[plain(name)] += [
                    str(group.mp_policy),
                    str(group.offload_policy),
                    after and after.mesh.shape,
                    group.gradient_divide_factor,
                ]
    return str((lies, told))


def _least(name, right):
    """Some gradients are 0 but for rounding: a key's bias does nothing behind a softmax."""
    kind = name.partition(" ")[0]
    largest = max(t.abs().max().item() for n, t in right.items() if n.partition(" ")[0] == kind)
    return 1e-3 * largest


def train(model, rank, size, steps, rows=(0, 1)):
    """Logits, loss, gradients and weights of some steps, by name, all of them whole."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    seen = {}
    for step in range(steps):
        tokens, labels = data(model.config.vocab_size, seed=step)
        part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        output = model(input_ids=tokens[part], labels=labels[part], use_cache=False)
        output.loss.backward()
        loss = whole(output.loss).clone()
        if size > 1 or rows == (0, 1):
            distributed.all_reduce(loss)
            loss /= distributed.get_world_size()
        seen[f"loss {step}"] = loss
        own = slice(rows[0] * BATCH // rows[1], (rows[0] + 1) * BATCH // rows[1])
        seen[f"logits {step}"] = whole(output.logits)[
            own if rows != (0, 1) else slice(None)
        ].clone()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, f"{name} has no gradient"
                seen[f"gradient {plain(name)} {step}"] = whole(parameter.grad).clone()
            else:
                assert parameter.grad is None, f"{name} is frozen and has a gradient"
        optimizer.step()
        optimizer.zero_grad()
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    for name, parameter in model.named_parameters():
        seen[f"weight {plain(name)}"] = whole(parameter).clone()
    return seen


def halved(model, path):
    """How far the gradients of a plan that divides by 8 are from half of the single process's."""
    single, made = build(model), build(model)
    rank, size = numerics.by_planc(made, planc.lower(made, path, world_size=4))
    right, seen = train(single, 0, 1, 1), train(made, rank, size, 1)
    names = [n for n in right if n.startswith("gradient")]
    return max(error(seen[n], right[n] / 2, _least(n, right)) for n in names)


def gathered(path):
    """Passes through the blocks of a four-layer llama and the gathers of one step, in order."""
    from unittest import mock

    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as Group

    names, seen = {}, []
    gather, before, after = Group.unshard, Group.pre_forward, Group.pre_backward

    def note(kind, method):
        def noted(self, *arguments):
            known = self._all_gather_result is not None or self.is_unsharded
            if id(self) in names and not (kind == "gather" and known):
                seen.append(f"{kind} {names[id(self)]}")
            return method(self, *arguments)

        return noted

    with (
        mock.patch.object(Group, "unshard", note("gather", gather)),
        mock.patch.object(Group, "pre_forward", note("forward", before)),
        mock.patch.object(Group, "pre_backward", note("backward", after)),
    ):  # before the plan is applied, which binds methods of its units
        made = build("llama", num_hidden_layers=4)
        numerics.by_planc(made, planc.lower(made, path, world_size=4))
        for name, unit in made.named_modules():
            if isinstance(unit, FSDPModule) and "layers." in name:
                short = name.removeprefix("model.layers.")
                for group in unit._get_fsdp_state()._fsdp_param_groups:
                    names[id(group)] = short
        train(made, distributed.get_rank(), 4, 1)
    return seen


def islands(path):
    """The digests of a bf16 model with fp32 norms, and its distance from the fp32 model."""
    tokens, labels = data(build("llama").config.vocab_size, seed=0)
    single = build("llama")
    right = single(input_ids=tokens, labels=labels, use_cache=False)
    bits, far = {}, 0.0
    for way, spread in (("applied", None), ("script", numerics.by_script), ("hand", dark)):
        made = build("llama").to(torch.bfloat16)
        for name, module in made.named_modules():
            if name.endswith("norm"):
                module.float()
        lowered = planc.lower(made, path, world_size=4)
        if way == "hand":
            rank, _ = dark(made)
        else:
            rank, _ = (spread or numerics.by_planc)(made, lowered)
        part = slice(rank, rank + 1)
        output = made(input_ids=tokens[part], labels=labels[part], use_cache=False)
        output.loss.backward()
        assert {p.grad.dtype for p in made.parameters()} == {torch.float32, torch.bfloat16}
        bits[way] = numerics.bits(output.logits, *(p.grad for p in made.parameters()))
        far = max(far, error(output.logits, right.logits[part].detach()))
    return {"far": far, **bits}


def dark(model):
    mesh = world()
    own = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    for block in model.model.layers:
        fully_shard(block.input_layernorm, mesh=mesh, mp_policy=own)
        fully_shard(block.post_attention_layernorm, mesh=mesh, mp_policy=own)
    fully_shard(model.model.norm, mesh=mesh, mp_policy=own)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return place(mesh, "dp_shard")


def handle(path):
    """What the handle of a run knows of its meshes, and what it computes over them."""
    made = build("llama")
    run = planc.apply(made, path, device_type="cpu")
    single = build("llama")
    tokens, labels = data(single.config.vocab_size, seed=0)
    own = slice(
        run.data_rank * BATCH // run.data_size, (run.data_rank + 1) * BATCH // run.data_size
    )
    loss = run.model(input_ids=tokens[own], labels=labels[own], use_cache=False).loss
    loss.backward()
    right = single(input_ids=tokens, labels=labels, use_cache=False).loss
    right.backward()
    norm = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.1)
    mine = run.clip_grad_norm_(0.1)
    mean = loss.detach().clone()
    distributed.all_reduce(mean, group=run.loss_mesh.get_group())
    gradients = {n: p.grad for n, p in single.named_parameters()}
    worst = max(
        error(p.grad, gradients[plain(n)], 1e-3 * norm.item()) for n, p in made.named_parameters()
    )
    with run.unshard(), torch.no_grad():
        logits = run.model(input_ids=tokens).logits
    with torch.no_grad():
        expected = single(input_ids=tokens, use_cache=False).logits
    weights = run.full_state_dict(every_rank=True)
    state = single.state_dict()
    return {
        "data": (run.data_size, run.data_mesh.size(), run.meshes["dp"].size()),
        "loss": (run.loss_mesh.size(), run.meshes["loss"].size()),
        "errors": {
            "loss": error(mean / run.loss_mesh.size(), right.detach()),
            "norm": error(mine, norm),
            "gradient": worst,
            "unshard": error(logits, expected),
            "weights": max(error(weights[n], state[n]) for n in state),
        },
    }


def resumed(old, new, folder):
    """Losses of four steps without a break, and of two and two with another plan between."""
    run = applied("llama", old, ())
    right = steps(run, optimizer_of(run), 0, 4)
    run = applied("llama", old, ())
    optimizer = optimizer_of(run)
    losses = steps(run, optimizer, 0, 2)
    run.save(folder, optimizer=optimizer, step=2)
    distributed.barrier()
    before = run.full_state_dict(every_rank=True)
    run = fresh("llama", new, ())
    optimizer = optimizer_of(run)
    step = run.load(folder, optimizer=optimizer)
    after = run.full_state_dict(every_rank=True)
    equal = all(torch.equal(before[n], after[n]) for n in before)
    return {"right": right, "losses": losses + steps(run, optimizer, step, 4), "equal": equal}


def homes(path):
    """Where materialize puts the parameters of a plan that offloads, and those it ignores.

    meta stands for a device that is not the CPU.
    """
    from loading_jobs import on_meta

    from planc.runtime.standalone.load_weights import materialize

    model = on_meta("llama")
    planc.apply(model, path, device_type="cpu")
    materialize(model, {}, "meta")
    return {plain(n): p.device.type for n, p in model.named_parameters()}


# By hand -----------------------------------------------------------------------------------------


def world(*sizes, names=("dp_shard",)):
    return init_device_mesh("cpu", sizes or (4,), mesh_dim_names=names)


def place(mesh, *axes):
    rank, size = 0, 1
    for axis in axes:
        rank = rank * mesh[axis].size() + mesh[axis].get_local_rank()
        size *= mesh[axis].size()
    return rank, size


def ignoring(model):
    mesh = world()
    model.model.embed_tokens.requires_grad_(False)
    for block in model.model.layers:
        block.input_layernorm.requires_grad_(False)
    ignored = set(model.model.embed_tokens.parameters())
    for block in model.model.layers:
        ignored |= set(block.input_layernorm.parameters())
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored, reshard_after_forward=False)
    return place(mesh, "dp_shard")


def freezing(model):
    mesh = world()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers.requires_grad_(False)
    for block in model.model.layers:
        block.mlp.requires_grad_(True)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return place(mesh, "dp_shard")


def sized(model):
    mesh = world()
    for block in model.model.layers:
        fully_shard(block.mlp, mesh=mesh)
    fully_shard(model.model, mesh=mesh)  # it has as many that no block holds
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return place(mesh, "dp_shard")


def partly(model):
    mesh = world()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return place(mesh, "dp_shard")


def partly_copied(model):
    mesh = world(2, 2, names=("dp_replicate", "dp_shard"))
    placement = along(1, 2)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return place(mesh, "dp_replicate", "dp_shard")


def along(dim, ranks):
    def placement(parameter):
        shape = getattr(parameter, "_local_tensor", parameter).shape
        return Shard(dim) if len(shape) > dim and shape[dim] % ranks == 0 else None

    return placement


def second_dim(model):
    mesh = world()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, shard_placement_fn=along(1, 4))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return place(mesh, "dp_shard")


def second_dim_tensor(model):
    mesh = world(2, 2, names=("dp_shard", "tp"))
    for block in model.model.layers:
        plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
        plan |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp_shard"], shard_placement_fn=along(1, 2))
    fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=True)
    return place(mesh, "dp_shard")


def own_axes(model):
    mesh = world(2, 2, names=("a", "b"))
    both = mesh["a", "b"]._flatten("a_b")
    turned = type(mesh)._concatenate([mesh["a"], mesh["b"]])
    for block in model.model.layers:
        fully_shard(block.mlp, mesh=turned)
        fully_shard(block, mesh=both)
    fully_shard(model, mesh=both, reshard_after_forward=True)
    return place(mesh, "a", "b")


def fetched(model):
    mesh = world()
    layers = model.model.layers
    for block in layers:
        fully_shard(block.mlp, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for i, block in enumerate(layers):
        ahead = [unit for b in layers[i + 1 : i + 3] for unit in (b, b.mlp)]
        if ahead:
            block.set_modules_to_forward_prefetch(ahead)
        before = [unit for b in reversed(layers[max(i - 1, 0) : i]) for unit in (b, b.mlp)]
        if before:
            block.set_modules_to_backward_prefetch(before)
    return place(mesh, "dp_shard")


def divided(model):
    mesh = world()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(8)
            unit.set_force_sum_reduction_for_comms(True)
    return place(mesh, "dp_shard")


def hosted(model):
    mesh = world()
    policy = CPUOffloadPolicy(pin_memory=False)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy, reshard_after_forward=True)
    return place(mesh, "dp_shard")


def classed(model):
    mesh = world()
    for block in model.model.layers:
        fully_shard(block.mlp, mesh=mesh)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return place(mesh, "dp_shard")


def mixed(model):
    mesh = world()
    half, single = torch.bfloat16, torch.float32
    common = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=single)
    norm = MixedPrecisionPolicy(param_dtype=single, output_dtype=half)
    head = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=half, output_dtype=single, cast_forward_inputs=False
    )
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=common)
    fully_shard(model.model.norm, mesh=mesh, mp_policy=norm)
    fully_shard(model.lm_head, mesh=mesh, mp_policy=head)
    fully_shard(model, mesh=mesh, mp_policy=common, reshard_after_forward=True)
    return place(mesh, "dp_shard")


def copied(model):
    mesh = world(4, names=("dp",))
    for block in model.model.layers:
        replicate(block, mesh=mesh)
    replicate([model.model.norm, model.lm_head], mesh=mesh)
    replicate(model, mesh=mesh)
    return place(mesh, "dp")


def copied_tensor(model):
    mesh = world(2, 2, names=("dp", "tp"))
    for block in model.model.layers:
        plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
        plan |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    for block in model.model.layers:
        replicate(block, mesh=mesh["dp"])
    replicate(model, mesh=mesh["dp"])
    return place(mesh, "dp")
