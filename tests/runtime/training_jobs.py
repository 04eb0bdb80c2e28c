"""What test_training.py runs on every rank."""

import torch
from numerics import BATCH, build, data, error, plain, whole
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import planc
from planc.runtime.standalone.shards import in_own_order, rank_orders


def applied(model, plan, overrides, changes=None):
    """Nothing is compared between ranks: collectives are counted here."""
    made = build(model, **(changes or {}))
    given = {"device_type": "cpu", "compare": 0, "allow_code": True}
    return planc.apply(made, plan, overrides=overrides, **given)


def mine(run, *tensors):
    rows = BATCH // run.data_size
    return [t[run.data_rank * rows :][:rows] for t in tensors]


def backward(run, seed):
    tokens, labels = mine(run, *data(run.model.config.vocab_size, seed))
    run.model(input_ids=tokens, labels=labels).loss.backward()


KINDS = ("reduce_scatter", "all_reduce", "all_gather")


def counted(*passes):
    """The collectives of each kind, over several passes: a mode follows one pass only."""
    counts = dict.fromkeys(KINDS, 0)
    for step in passes:
        with CommDebugMode() as comm:
            step()
        for op, count in comm.get_comm_counts().items():
            for kind in KINDS:
                # functional collectives are spelled all_reduce, the others allreduce_
                counts[kind] += count if kind.replace("_", "") in str(op).replace("_", "") else 0
    return counts


def accumulate(model, plan, overrides, changes=None, steps=3, whole=True):
    """The reductions of the passes under no_sync and of the last, and the error of the sum."""
    single = build(model, **(changes or {}))
    for seed in range(steps):
        tokens, labels = data(single.config.vocab_size, seed)
        single(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    run = applied(model, plan, overrides, changes)
    passes = [lambda seed=seed: backward(run, seed) for seed in range(steps)]
    with run.no_sync(whole=whole):
        before = counted(*passes[:-1])
    last = counted(passes[-1])
    right = dict(single.named_parameters())
    worst = max(error(p.grad, right[plain(n)].grad) for n, p in run.model.named_parameters())
    return {"before": before, "last": last, "error": worst}


def infer(model, plan, overrides):
    """The gathers of three forward passes within unshard, and outside before and after."""
    single = build(model)
    tokens, _ = data(single.config.vocab_size)
    with torch.no_grad():
        right = single(input_ids=tokens, use_cache=False).logits
    run = applied(model, plan, overrides)

    def gathers(times):
        outputs = []

        def step():
            outputs.append(run.model(input_ids=tokens).logits)

        with torch.no_grad():
            counts = counted(*[step] * times)
        return counts["all_gather"], max(error(out, right) for out in outputs)

    def at_rest():
        return sum(
            (p.to_local() if isinstance(p, DTensor) else p).numel() for p in run.model.parameters()
        )

    first = gathers(1)  # before the first forward pass FSDP is not set up
    sharded = at_rest()
    with run.unshard():
        inside, open_ = gathers(3), at_rest()
    closed = at_rest()
    return {
        "first": first,
        "inside": inside,
        "after": gathers(1),
        "numbers": (sharded, open_, closed),
        "gradient": error_after(run, model),
    }


def early(model, plan, overrides):
    """unshard before anything else ran."""
    run = applied(model, plan, overrides)
    tokens, _ = data(run.model.config.vocab_size)
    single = build(model)
    with run.unshard(), torch.no_grad():
        out = run.model(input_ids=tokens).logits
        right = single(input_ids=tokens, use_cache=False).logits
    return error(out, right), error_after(run, model)


def error_after(run, model):
    """Training still works: the worst gradient of one backward pass."""
    single = build(model)
    tokens, labels = data(single.config.vocab_size)
    single(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    backward(run, 3)
    right = dict(single.named_parameters())
    return max(error(p.grad, right[plain(n)].grad) for n, p in run.model.named_parameters())


def clip(model, plan, overrides, norm_type, fraction):
    """Norms of the single process and the run, and the worst gradient after clipping."""
    single = build(model)
    tokens, labels = data(single.config.vocab_size)
    single(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    measured = torch.nn.utils.clip_grad_norm_(single.parameters(), float("inf"), norm_type)
    limit = measured.item() * fraction
    torch.nn.utils.clip_grad_norm_(single.parameters(), limit, norm_type)
    run = applied(model, plan, overrides)
    backward(run, 3)
    norm = run.clip_grad_norm_(limit, norm_type)
    reference = dict(single.named_parameters())
    layouts = {layout(p) for p in run.model.parameters()}
    own = rank_orders(run.model)
    worst = max(
        error(in_own_order(whole(p.grad), own.get(plain(n))), reference[plain(n)].grad)
        for n, p in run.model.named_parameters()
    )
    return {
        "norm": norm.item(),
        "right": measured.item(),
        "error": worst,
        "layouts": sorted(layouts),
    }


def layout(parameter):
    if not isinstance(parameter, DTensor):
        return "plain"
    return " ".join(parameter.device_mesh.mesh_dim_names)


def clip_by_hand(dtype):
    """Gradients on every kind of layout at once: two meshes, replicated, partial, plain, none; a
    rank has nothing of one of them.
    """
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    from planc.runtime.standalone.clipping import clip_grad_norm

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    placements = {
        "both": (mesh, [Shard(0), Shard(1)]),
        "shard": (mesh["dp_shard"], [Shard(0)]),
        "uneven": (mesh["tp"], [Shard(0)]),
        "copied": (mesh["tp"], [Replicate()]),
        "crossed": (mesh, [Replicate(), Shard(0)]),
        "empty": (mesh, [Shard(0), Replicate()]),
    }
    dtype = getattr(torch, dtype)
    shapes = {"both": (4, 6), "shard": (8,), "uneven": (5, 3)}
    shapes |= {"copied": (7,), "crossed": (6, 2), "empty": (1, 3)}
    generator = torch.Generator().manual_seed(0)
    model, grads = nn.Module(), {}
    for name, (where, how) in placements.items():
        full = torch.randn(shapes[name], generator=generator, dtype=dtype)
        grads[name] = torch.randn(shapes[name], generator=generator, dtype=dtype)
        parameter = nn.Parameter(distribute_tensor(full, where, how))
        parameter.grad = distribute_tensor(grads[name].clone(), where, how)
        model.register_parameter(name, parameter)
    grads["norm"], grads["plain"] = torch.randn(2, 7, generator=generator, dtype=dtype).unbind()
    norm = nn.Parameter(distribute_tensor(torch.ones(7, dtype=dtype), mesh["tp"], [Replicate()]))
    # a sequence parallel norm's gradient: each rank has a part of the sum
    part = grads["norm"] * (0.25 if mesh["tp"].get_local_rank() == 0 else 0.75)
    norm.grad = DTensor.from_local(part, mesh["tp"], [Partial()])
    model.register_parameter("norm", norm)
    model.register_parameter("plain", nn.Parameter(torch.zeros(7, dtype=dtype)))
    model.plain.grad = grads["plain"].clone()
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    right = torch.cat([g.flatten() for g in grads.values()]).norm()
    total = clip_grad_norm(model, right.item() / 4)
    assert model.norm.grad.placements == (Partial(),)
    worst = max(error(getattr(model, n).grad, g / 4) for n, g in grads.items())
    return total.item(), right.item(), worst


def full(model, plan, overrides, every_rank, changes=None):
    """Whether the gathered state dict is the single process's, bit for bit and in order."""
    right = build(model, **(changes or {})).state_dict()
    run = applied(model, plan, overrides, changes)
    tokens, _ = data(run.model.config.vocab_size)
    with torch.no_grad():  # leaves the units that never reshard whole
        run.model(input_ids=mine(run, tokens)[0])
    got = run.full_state_dict(every_rank=every_rank)
    if not got:
        return "empty"
    assert list(got) == list(right)
    assert all(torch.equal(got[n], right[n]) for n in right)
    assert all(type(t) is torch.Tensor and t.device.type == "cpu" for t in got.values())
    ties = sum(t.data_ptr() == got["lm_head.weight"].data_ptr() for t in got.values())
    with torch.no_grad():
        for parameter in run.model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()
    assert all(torch.equal(got[n], right[n]) for n in right), "not a copy"
    return ties
