"""What test_budgets_held.py runs on every rank: bytes held, and gradients."""

import contextlib
import gc
from pathlib import Path
from unittest import mock

import torch
from activation_checkpoint_jobs import applied
from numerics import BATCH, build, data, gradients_of
from torch import distributed

import planc
from planc.ops.activation_checkpoint import Checkpoint
from planc.runtime.standalone import activation_checkpoint
from planc.sections.checkpoint import choice
from planc.tools.measure.storages import Storages


def _plan(folder, family, rule):
    path = Path(folder) / f"rank{distributed.get_rank()}.plan"
    text = f"override checkpoint {{\n    $blocks : {rule}\n}}\n"
    path.write_text(f'plan b for any\nextend "{family}"\n{text}')
    return str(path)


def _shares(plan, model, overrides):
    """The lowered plan of a model, and what each place of the pipeline keeps."""
    found, real = [], choice._shares

    def noting(*args):
        found.extend(real(*args))
        return tuple(found)

    with mock.patch.object(choice, "_shares", noting):
        world = distributed.get_world_size()
        lowered = planc.lower(build(model), plan, world_size=world, overrides=overrides)
    return lowered, found


@contextlib.contextmanager
def _parking(parked):
    """Notes the sizes of what is copied to the host's memory, which is the CPU's here."""
    real = activation_checkpoint._Parked.__init__

    def noting(self, tensor, pin):
        real(self, tensor, pin)
        parked.append(self.held.untyped_storage().nbytes())

    with mock.patch.object(activation_checkpoint._Parked, "__init__", noting):
        yield


def held(folder, model, family, overrides, share, rows, more=""):
    """On this rank: bytes of activations that a forward pass leaves, more than with `full`: with a
    budget, as it was predicted, and without checkpoints; whether gradients have the bits of the
    latter; the number of operators that are kept; and bytes in the host's memory, and as predicted.
    """
    found, gradients, parked = [], [], []
    budget = f"budget({share}, rows = {rows}, seq = 16{more})"
    for rule in ("full", budget, "none"):
        made, tokens, labels = applied(model, _plan(folder, family, rule), overrides, "sdpa")
        made(input_ids=tokens, labels=labels).loss.backward()  # FSDP makes room once, at first
        made.zero_grad()
        gc.collect()
        storages = Storages(lambda: "")
        with storages.counting(), _parking(parked):
            loss = made(input_ids=tokens, labels=labels).loss
            gc.collect()
        found.append(sum(size for _, size, _ in storages.known.values()))
        loss.backward()
        gradients.append(gradients_of(made))
    plan = _plan(folder, family, budget)
    lowered, (*_, own) = _shares(plan, model, overrides)
    predicted = own.held_bytes(own.points) - own.least
    kept = sum(len(op.save) for op in lowered.ops if isinstance(op, Checkpoint))
    same = all(torch.equal(gradients[1][name], right) for name, right in gradients[2].items())
    away = sum(parked), sum(point.away for point in own.points.values())
    return found[1] - found[0] - away[0], predicted, found[2] - found[0], same, kept, away


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
