"""What test_run_metrics.py runs on every rank."""

import torch
from numerics import build, data
from torch import distributed

import planc

ROWS, LENGTH, STEPS, PASSES = 8, 16, 2, 2


def batches(step, vocabulary):
    """The rows of a step by pass, the last four tokens of every third row padding."""
    made = []
    for at in range(PASSES):
        tokens = torch.cat(
            [data(vocabulary, 100 * step + 10 * at + part)[0] for part in range(ROWS // 4)]
        )
        mask = torch.ones_like(tokens)
        mask[::3, -4:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        made.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return made


def by_hand(model):
    """(tokens, tokens of each expert by module) of all steps, of the model without planc."""
    single = build(model)
    loads = {}
    for name, module in single.named_modules():
        if name.endswith(".experts"):

            def note(_, args, name=name):
                counted = torch.bincount(args[1].flatten(), minlength=args[1].max() + 1)
                before = loads.get(name, torch.zeros(4, dtype=torch.long))
                loads[name] = before + torch.nn.functional.pad(counted, (0, 4 - len(counted)))

            module.register_forward_pre_hook(note)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.01)
    tokens = 0
    for step in range(STEPS):
        parts = batches(step, single.config.vocab_size)
        valid = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        for part in parts:
            single(**part, num_items_in_batch=valid).loss.backward()
            tokens += int(part["attention_mask"].sum())
        optimizer.step()
        optimizer.zero_grad()
    return tokens, {name: found.tolist() for name, found in loads.items()}


def counted(model, plan, overrides, asked="all"):
    """What a run says after its steps."""
    made = build(model)
    metrics = asked == "all" or distributed.get_rank() == asked
    run = planc.apply(
        made, plan, overrides=["param_dtype=fp32", *overrides], device_type="cpu", metrics=metrics
    )
    optimizer = run.optimizer(torch.optim.SGD(made.parameters(), lr=0.01))
    rows = ROWS // run.data_size
    losses = []
    for step in range(STEPS):
        parts = batches(step, made.config.vocab_size)
        mine = [{n: v[run.data_rank * rows :][:rows] for n, v in part.items()} for part in parts]
        losses.append(run.forward_backward(mine).item())
        optimizer.step()
        optimizer.zero_grad()
        run.evaluate(mine)  # counts for nothing
    first = distributed.get_rank() == 0
    numbers = run.metrics() if first else {}  # a rank alone may ask
    loads = run.tokens_per_expert() if first else {}
    return {"numbers": numbers, "loads": loads, "again": run.metrics() if first else {}}


BIASES = ("e_score_correction_bias", "expert_bias")
RATE = 0.001


def biases_by_hand(model, count=STEPS):
    """The biases of the routers after some steps of one process that moves them, by name."""
    single = build(model)
    biases = {n: t for n, t in single.state_dict(keep_vars=True).items() if n.endswith(BIASES)}
    loads = {}
    for name, module in single.named_modules():
        if name.endswith(".experts"):
            parent = name.rpartition(".")[0]

            def note(_, args, parent=parent):
                counts = torch.bincount(args[1].flatten(), minlength=4).double()
                loads[parent] = loads.get(parent, 0) + counts

            module.register_forward_pre_hook(note)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.01)
    for step in range(count):
        loads.clear()
        parts = batches(step, single.config.vocab_size)
        valid = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        for part in parts:
            single(**part, num_items_in_batch=valid).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for parent, counts in loads.items():
            [bias] = [t for n, t in biases.items() if n.startswith(parent)]
            with torch.no_grad():
                more = torch.where(counts < counts.mean(), RATE, 0.0)
                less = torch.where(counts > counts.mean(), RATE, 0.0)
                bias += (more - less).to(bias.dtype).view(bias.shape)
    return {n: t.detach().flatten().tolist() for n, t in biases.items()}


def balanced(model, plan, overrides, folder, others=None):
    """The biases after the steps of a run, after it is resumed under another mesh, and after as
    many steps there.
    """
    run, found = _run(model, plan, overrides), []
    _stepped(run, range(STEPS))
    found.append(run.full_state_dict(every_rank=True))
    if others is not None:
        run.save(folder, step=STEPS)
        run = _run(model, plan, others)
        run.load(folder)
        found.append(run.full_state_dict(every_rank=True))
        _stepped(run, range(STEPS, 2 * STEPS))
        found.append(run.full_state_dict(every_rank=True))
    return [{n: t.flatten().tolist() for n, t in s.items() if n.endswith(BIASES)} for s in found]


def _run(model, plan, overrides):
    given = {"device_type": "cpu", "metrics": True}
    return planc.apply(build(model), plan, overrides=["param_dtype=fp32", *overrides], **given)


def _stepped(run, steps):
    """Trains, and moves the biases after each step."""
    optimizer = run.optimizer(torch.optim.SGD(run.model.parameters(), lr=0.01))
    rows = ROWS // run.data_size
    for step in steps:
        parts = batches(step, run.model.config.vocab_size)
        mine = [{n: v[run.data_rank * rows :][:rows] for n, v in part.items()} for part in parts]
        run.forward_backward(mine)
        optimizer.step()
        optimizer.zero_grad()
        run.balance_experts(RATE)


def without(model, plan, overrides):
    """The hooks that count in a run which is not asked, its meter, and what it says."""
    run = planc.apply(build(model), plan, overrides=overrides, device_type="cpu")
    every = (hook for m in run.model.modules() for hook in m._forward_pre_hooks.values())
    hooks = sum("Meter" in repr(hook) for hook in every)
    try:
        run.metrics()
    except ValueError as error:
        return hooks, run.steps.meter, str(error)
    raise AssertionError("metrics of a run that counts nothing")
