"""What test_optimizer_section.py runs on every rank of the pool."""

import logging
from unittest import mock

import torch
from loading_jobs import fresh
from numerics import bits, build, data, emitted, error, plain
from saving_jobs import batch
from torch import distributed, nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.utils._pytree import tree_leaves
from training_jobs import applied

import planc
from planc.runtime.executor import apply_for_reference
from planc.runtime.sharded_tensors import sharded_like
from planc.runtime.standalone.dcp_chunks import Pieces
from planc.runtime.standalone.kept_states import state_values
from planc.runtime.standalone.optimizer import optimize, planned_optimizer
from planc.runtime.standalone.shards import part_of, rank_orders, select_ranges, slices_of, whole_of
from planc.runtime.weights.background import snapshot

TERMS = {"lr": 0.01, "weight_decay": 0.1}


def _single(model, plan, overrides, double, steps):
    """(parameters before, after, the names of those that Muon steps) of one process."""
    single = build(model)
    single = single.double() if double else single
    world = distributed.get_world_size()
    lowered = planc.lower(single, plan, world_size=world, overrides=overrides)
    apply_for_reference(single, lowered)
    before = {name: value.clone() for name, value in single.state_dict().items()}
    optimizer = planned_optimizer(single, **TERMS)
    for seed in range(steps):
        tokens, labels = data(single.config.vocab_size, seed)
        single(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(single.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    groups = (g["params"] for g in optimizer.param_groups if g["algorithm"] in ("muon", "class"))
    stepped = {id(p) for group in groups for p in group}
    muon = [name for name, p in single.named_parameters() if id(p) in stepped]
    return before, single.state_dict(), muon


def _step(run, optimizer, seed):
    tokens, labels = batch(run, seed)
    loss = run.forward_backward([{"input_ids": tokens, "labels": labels}])
    run.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _errors(mine, before, after, muon):
    """The largest error of the change that Muon or a class makes, relative to it, and
    of the value of another one, relative to the value; each with the name.
    """
    change = {n: error(mine[n] - before[n], after[n] - before[n]) for n in muon}
    value = {n: error(mine[n], after[n]) for n in after if n not in muon}
    return {
        kind: max(((value, name) for name, value in errors.items()), default=(0.0, ""))
        for kind, errors in (("muon", change), ("others", value))
    }


def train(model, plan, overrides, double=False):
    """How far three steps of the plan's optimizer are from one process."""
    before, after, muon = _single(model, plan, overrides, double, 3)
    made = build(model)
    made = made.double() if double else made
    run = planc.apply(made, plan, overrides=overrides, device_type="cpu", allow_code=True)
    optimizer = run.optimizer(**TERMS)
    for seed in range(3):
        _step(run, optimizer, seed)
    return _errors(run.full_state_dict(every_rank=True), before, after, muon)


def exact(model, plan, overrides):
    """How far three steps in float64 are from those of one process with the same gradients, of the
    change of the parameter that is worst; and how many parameters Muon steps on shards.
    """
    single, made = (build(model).double() for _ in range(2))
    world = distributed.get_world_size()
    apply_for_reference(single, planc.lower(single, plan, world_size=world, overrides=overrides))
    run = planc.apply(made, plan, overrides=overrides, device_type="cpu")
    right, mine = planned_optimizer(single, **TERMS), run.optimizer(**TERMS)
    before = {name: p.detach().clone() for name, p in single.named_parameters()}
    orders = rank_orders(made)
    for step in range(3):
        torch.manual_seed(step)
        for p in single.parameters():
            p.grad = torch.randn_like(p) * 10.0 ** (step - 2)
        gradients = {name: p.grad for name, p in single.named_parameters()}
        for name, p in made.named_parameters():
            part = select_ranges(
                gradients[plain(name)], slices_of(p, orders.get(plain(name)))
            ).clone()
            p.grad = sharded_like(part, p) if isinstance(p, DTensor) else part
        right.step()
        mine.step()
    found = dict(single.named_parameters())
    errors = {
        plain(name): error(whole_of(p, orders.get(plain(name))) - before[plain(name)], change)
        for name, p in made.named_parameters()
        for change in [found[plain(name)] - before[plain(name)]]
    }
    muon = [p for g in mine.param_groups if g["algorithm"] == "muon" for p in g["params"]]
    return max((v, n) for n, v in errors.items()), len(muon)


def script(model, plan, overrides):
    """Whether the emitted script's optimizer steps as planc's, bit for bit."""
    found = []
    for written in (False, True):
        made = build(model)
        world = distributed.get_world_size()
        lowered = planc.lower(made, plan, world_size=world, overrides=overrides)
        if written:
            rank, size, names = emitted(made, lowered)
            optimizer = names["planned_optimizer"](made, **TERMS)
        else:
            run = planc.apply(made, lowered, device_type="cpu", allow_code=True)
            rank, size, optimizer = run.data_rank, run.data_size, run.optimizer(**TERMS)
        for seed in range(2):
            tokens, labels = data(made.config.vocab_size, seed)
            rows = len(tokens) // size
            mine = slice(rank * rows, (rank + 1) * rows)
            made(input_ids=tokens[mine], labels=labels[mine]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(bits(*(p.detach() for p in made.parameters())))
    return found


def resume(model, plan, old, new, folder):
    """Losses of six steps without a break, and of three and three with another mesh between."""
    run = applied(model, plan, old)
    optimizer = run.optimizer(**TERMS)
    right = [_step(run, optimizer, seed) for seed in range(6)]
    run = applied(model, plan, old)
    optimizer = run.optimizer(**TERMS)
    losses = [_step(run, optimizer, seed) for seed in range(3)]
    run.save(folder, optimizer=optimizer, step=3)
    saved = _states(run, optimizer)
    run = fresh(model, plan, new)
    optimizer = run.optimizer(**TERMS)
    step = run.load(folder, optimizer=optimizer)
    loaded = _states(run, optimizer)
    equal = all(torch.equal(loaded[n], saved[n]) for n in saved) and saved.keys() == loaded.keys()
    losses += [_step(run, optimizer, seed) for seed in range(step, 6)]
    every = (value for state in optimizer.state.values() for value in state.values())
    kept = (value.dtype for value in every if isinstance(value, torch.Tensor))
    return {
        "losses": losses,
        "right": right,
        "equal": equal,
        "states": sorted(saved),
        "dtypes": sorted({str(dtype) for dtype in kept}),
    }


def copied(model, plan, overrides, folder):
    """Bytes that a save in the background copies on this rank, and those that are estimated."""
    from planc.runtime.weights import saving

    run, world = applied(model, plan, overrides), distributed.get_world_size()
    optimizer = run.optimizer(**TERMS)
    _step(run, optimizer, 0)
    counted = []

    def noted(state):
        found = snapshot(state)
        leaves = (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        own = (leaf.part if isinstance(leaf, Pieces) else part_of(leaf) for leaf in leaves)
        counted.append(sum(part.numel() * part.element_size() for part in own if part.dim()))
        return found

    with mock.patch.object(saving, "snapshot", noted):
        run.save(folder, optimizer=optimizer, asynchronous=True)
        run.finish_save()
    size = {"world_size": world, "batch": 4, "seq": 16, "overrides": overrides}
    found = planc.estimate(build(model), plan, **size).estimate
    return counted[0], max(rank.copied for rank in found.ranks)


def changed(model, plans, overrides, folder):
    """A checkpoint of one optimizer section loaded under another one, on the same mesh.

    Returns:
        of each parameter: whether a step of the new section is that of the old one, and that of
        an optimizer which begins anew; of each group its algorithm and numbers after the next step
        of the schedule; and what planc logged of states that begin anew.
    """
    said = []

    def begun(plan, *, states):
        run = fresh(model, plan, overrides)
        optimizer = run.optimizer(**TERMS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        if states:
            heard = mock.patch.object(logging.getLogger("planc"), "warning")
            with heard as warned:
                run.load(folder, optimizer=optimizer, extra={"schedule": schedule})
            said.extend(call.args[0] % call.args[1:] for call in warned.call_args_list)
        else:
            run.load(folder)
            for group in optimizer.param_groups:
                group["lr"] *= 0.25
        return run, optimizer, schedule

    run = applied(model, plans[0], overrides)
    optimizer = run.optimizer(**TERMS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for seed in range(2):
        _step(run, optimizer, seed)
        schedule.step()
    run.save(folder, optimizer=optimizer, extra={"schedule": schedule})
    ends = []
    for plan, states in ((plans[0], True), (plans[1], True), (plans[1], False)):
        run, optimizer, schedule = begun(plan, states=states)
        _step(run, optimizer, 2)
        ends.append({plain(n): bits(p.detach()) for n, p in run.model.named_parameters()})
        if states:
            schedule.step()
            numbers = ("algorithm", "lr", "weight_decay", "betas", "momentum")
            groups = [tuple(g.get(n) for n in numbers) for g in optimizer.param_groups]
    old, new, anew = ends
    same = {name: (new[name] == old[name], new[name] == anew[name]) for name in new}
    return same, groups, said


def _states(run, optimizer):
    orders = rank_orders(run.model)
    return {
        f"{plain(name)}.{key}": whole_of(
            value, orders.get(plain(name)) if value.shape == p.shape else None
        )
        for name, p in run.model.named_parameters()
        for key, kept in optimizer.state[p].items()
        for value in [state_values(kept, p)]
        if isinstance(value, torch.Tensor)
    }


def offloaded(model, plans, overrides, folder):
    """Whether plans with states on the device and on the host step alike, bit for bit, over a
    schedule, clipping, and a resume; and whether the states of the second one are on the host.
    """
    found, away = [], []
    for plan in plans:
        run, losses = applied(model, plan, overrides), []
        optimizer = run.optimizer(**TERMS)
        for start in (0, 2):
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for seed in (start, start + 1):
                losses.append(_step(run, optimizer, seed))
                schedule.step()
            run.save(f"{folder}/{len(found)}", optimizer=optimizer)
            run = fresh(model, plan, overrides)
            optimizer = run.optimizer(**TERMS)
            run.load(f"{folder}/{len(found)}", optimizer=optimizer)
        parameters = [p.detach() for p in run.model.parameters()]
        found.append((losses, bits(*parameters, *_states(run, optimizer).values())))
        every = (state for own in optimizer.state.values() for state in own.items())
        away.append({getattr(state, "host", False) for key, state in every if key != "step"})
    return found[0] == found[1], away


FACTORED = ((10, 7), (3, 8), (6,), (4, 6, 10), (1, 16), (16, 1))


def factored(mesh, dims):
    """How far five steps of Adafactor on shards in float64 are from torch's in one process, of the
    change of the parameter that is worst; some ranks hold nothing of the small ones.

    Args:
        mesh: its shape.
        dims: of a parameter that each of its dims shards; None where it replicates.
    """
    module, right, full = _on_shards(FACTORED, mesh, dims)
    terms = {"beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0, "state": None}
    optimize(module, "adafactor", lr=1.0, weight_decay=1.0, **terms)
    mine = planned_optimizer(module, 0.3, 0.1)
    theirs = torch.optim.Adafactor(right.parameters(), lr=0.3, weight_decay=0.1)
    return _apart(module, right, full, (mine, theirs))


MATRICES = ((2, 16), (10, 7), (3, 8), (1, 12), (12, 5), (3, 6, 10), (12, 6), (3, 4, 10))


def few_rows(mesh, dims):
    """As `factored`, of Muon: some ranks hold nothing of some matrices, and three have parts."""
    module, right, full = _on_shards(MATRICES, mesh, dims)
    for each in (module, right):
        units = dict.fromkeys((name for name, _ in each.named_parameters()), ())
        units |= {"p4": (0, (4, 4, 4)), "p6": (0, (4, 4, 4), True), "p7": (2, (5, 5), True)}
        terms = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr": "original"}
        same = {"lr": 1.0, "weight_decay": 1.0, "state": None, "compute": None, "units": units}
        optimize(each, "muon", **terms, **same)
    return _apart(module, right, full, [planned_optimizer(m, 0.3, 0.1) for m in (module, right)])


def _on_shards(shapes, mesh, dims):
    """(a module of parameters in float64 on shards, one of whole ones, their values)."""
    mesh = init_device_mesh("cpu", mesh)
    torch.manual_seed(0)
    full = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    module, right = nn.Module(), nn.Module()
    for i, value in enumerate(full):
        known = (d if d is not None and d < value.ndim else None for d in dims)
        placements = [Replicate() if d is None else Shard(d) for d in known]
        part = distribute_tensor(value.clone(), mesh, placements)
        module.register_parameter(f"p{i}", nn.Parameter(part))
        right.register_parameter(f"p{i}", nn.Parameter(value.clone()))
    return module, right, full


def _apart(module, right, full, optimizers):
    for step in range(5):
        for p, other in zip(module.parameters(), right.parameters(), strict=True):
            other.grad = torch.randn(other.shape, dtype=torch.float64) * 10.0 ** (step - 2)
            p.grad = distribute_tensor(other.grad.clone(), p.device_mesh, p.placements)
        for optimizer in optimizers:
            optimizer.step()
    ends = zip(module.parameters(), right.parameters(), full, strict=True)
    return max(
        ((p.full_tensor() - other).norm() / (other - start).norm()).item()
        for p, other, start in ends
    )
