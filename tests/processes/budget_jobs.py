"""What tests/processes/test_budgets_held.py runs on every rank: bytes held, and gradients."""

import gc
from pathlib import Path
from unittest import mock

import torch
from activation_checkpoint_jobs import applied
from numerics import BATCH, build, data, gradients_of
from torch import distributed

import planc
from planc.budget import choose
from planc.measure.storages import Storages
from planc.ops.activation_checkpoint import Checkpoint


def _plan(folder, family, rule):
    path = Path(folder) / f"rank{distributed.get_rank()}.plan"
    text = f"override checkpoint {{\n    $blocks : {rule}\n}}\n"
    path.write_text(f'plan b for any\nextend "{family}"\n{text}')
    return str(path)


def _shares(plan, model, overrides):
    """The lowered plan of a model, and what each place of the pipeline keeps."""
    found, real = [], choose.shares_of

    def noting(*args):
        found.extend(real(*args))
        return tuple(found)

    with mock.patch.object(choose, "shares_of", noting):
        world = distributed.get_world_size()
        lowered = planc.lower(build(model), plan, world_size=world, overrides=overrides)
    return lowered, found


def held(folder, model, family, overrides, share, rows):
    """On this rank: bytes of activations that a forward pass leaves, more than with `full`: with a
    budget, as it was predicted, and without checkpoints; whether gradients have the bits of the
    latter; and the number of operators that are kept.
    """
    found, gradients = [], []
    for rule in ("full", f"budget({share}, rows = {rows}, seq = 16)", "none"):
        made, tokens, labels = applied(model, _plan(folder, family, rule), overrides, "sdpa")
        made(input_ids=tokens, labels=labels).loss.backward()  # FSDP makes room once, at first
        made.zero_grad()
        gc.collect()
        storages = Storages(lambda: "")
        with storages.counting():
            loss = made(input_ids=tokens, labels=labels).loss
            gc.collect()
        found.append(sum(size for _, size, _ in storages.known.values()))
        loss.backward()
        gradients.append(gradients_of(made))
    plan = _plan(folder, family, f"budget({share}, rows = {rows}, seq = 16)")
    lowered, (*_, own) = _shares(plan, model, overrides)
    predicted = own.held(own.points) - own.least
    kept = sum(len(op.save) for op in lowered.ops if isinstance(op, Checkpoint))
    same = all(torch.equal(gradients[1][name], right) for name, right in gradients[2].items())
    return found[1] - found[0], predicted, found[2] - found[0], same, kept


def trained(folder, model, family, overrides, share, rows, changes=None):
    """Whether `run.forward_backward` gives the gradients of a run without checkpoints, bit for bit,
    and how many rules the budget was lowered to on all ranks.
    """
    gradients = []
    for rule in (f"budget({share}, rows = {rows}, seq = 16)", "none"):
        made = build(model, **(changes or {}))
        plan = _plan(folder, family, rule)
        run = planc.apply(made, plan, overrides=overrides, device_type="cpu")
        rules = [op for op in run.lowered.ops if isinstance(op, Checkpoint)]
        each = BATCH // run.data_size
        ids, labels = (t[run.data_rank * each :][:each] for t in data(made.config.vocab_size))
        run.forward_backward([{"input_ids": ids, "labels": labels}])
        gradients.append((gradients_of(made), len(rules)))
    (mine, rules), (right, _) = gradients
    return all(torch.equal(mine[n], g) for n, g in right.items()) and len(right), rules
