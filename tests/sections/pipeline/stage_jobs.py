"""What test_stages.py runs on every rank."""

import torch
from numerics import BATCH, build, data
from torch.distributed.tensor import DTensor

import planc
from planc.emit.python.script import render


def scripted(settings):
    """Whether the emitted script's losses and gradients have the bits of `apply`'s.

    Returns the number of gradients, that of the losses, and the parameters that differ.
    """
    models = [build("llama", num_hidden_layers=4) for _ in range(2)]
    run = planc.apply(models[0], "llama", overrides=settings, device_type="cpu")
    rows = BATCH // run.data_size
    ids, labels = (t[run.data_rank * rows :][:rows] for t in data(models[0].config.vocab_size))
    whole = {"input_ids": ids, "labels": labels}
    count = run.num_items_in_batch(labels)
    total = run.forward_backward([whole])
    space = {}
    exec(compile(render(run.lowered, digest=run.digest), "emitted.py", "exec"), space)
    mesh = space["build_mesh"]("cpu")
    space["parallelize"](models[1], mesh)
    losses = space["forward_backward"](models[1], mesh, [{**whole, "num_items_in_batch": count}])
    assert all(loss.isfinite() for loss in losses) and total.isfinite()
    right = dict(models[0].named_parameters())
    unlike = [n for n, p in models[1].named_parameters() if not _same(p.grad, right[n].grad)]
    return len(right), len(losses), unlike


def _same(one, other):
    one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (one, other))
    return torch.equal(one, other)
