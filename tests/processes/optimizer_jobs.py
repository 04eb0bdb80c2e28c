"""What test_optimizer_section.py runs on every rank of the pool."""

import torch
from loading_jobs import fresh
from numerics import bits, build, data, emitted, error, plain
from saving_jobs import batch
from torch import distributed, nn
from training_jobs import applied

import planc
from planc.runtime.executor import alone
from planc.runtime.standalone.optimizer import planned_optimizer
from planc.runtime.standalone.shards import rank_orders, whole_of

TERMS = {"lr": 0.01, "weight_decay": 0.1}


def _single(model, plan, overrides, double, steps):
    """(parameters before, after, the names of those that Muon steps) of one process."""
    single = build(model)
    single = single.double() if double else single
    world = distributed.get_world_size()
    lowered = planc.lower(single, plan, world_size=world, overrides=overrides)
    alone(single, lowered)
    before = {name: value.clone() for name, value in single.state_dict().items()}
    optimizer = planned_optimizer(single, **TERMS)
    for seed in range(steps):
        tokens, labels = data(single.config.vocab_size, seed)
        single(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(single.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    groups = (g["params"] for g in optimizer.param_groups if g["algorithm"] == "muon")
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
    """The largest error of the change of a parameter that Muon steps, relative to the change, and
    of the value of another one, relative to the value; each with the name.
    """
    change = {n: error(mine[n] - before[n], after[n] - before[n]) for n in muon}
    value = {n: error(mine[n], after[n]) for n in after if n not in muon}
    return {
        kind: max((value, name) for name, value in errors.items())
        for kind, errors in (("muon", change), ("others", value))
    }


def train(model, plan, overrides, double=False):
    """How far three steps of the plan's optimizer are from one process."""
    before, after, muon = _single(model, plan, overrides, double, 3)
    made = build(model)
    made = made.double() if double else made
    run = planc.apply(made, plan, overrides=overrides, device_type="cpu")
    optimizer = run.optimizer(**TERMS)
    for seed in range(3):
        _step(run, optimizer, seed)
    return _errors(run.full_state_dict(every_rank=True), before, after, muon)


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
            run = planc.apply(made, lowered, device_type="cpu")
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
    return {"losses": losses, "right": right, "equal": equal, "states": sorted(saved)}


def _states(run, optimizer):
    orders = rank_orders(run.model)
    return {
        f"{plain(name)}.{key}": whole_of(value, orders.get(plain(name)))
        for name, p in run.model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
