"""What test_run_profile.py runs on every rank."""

import json
from collections import Counter
from pathlib import Path

import torch
from numerics import build, data
from torch import distributed, nn

import planc

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks(model):
    """All hooks of a model by module and kind, and what else a profile may leave behind."""
    found = {(n, kind): [*getattr(m, kind)] for n, m in model.named_modules() for kind in HOOKS}
    return found, nn.Module.__call__, torch._C._len_torch_dispatch_stack()


def trained(model, plan, overrides, folder, ranks):
    """(losses, parameters, hooks before and after, the path of the trace) of five steps."""
    made = build(model)
    sets = ["param_dtype=fp32", *overrides]
    run = planc.apply(made, plan, overrides=sets, device_type="cpu", compare=0)
    optimizer = run.optimizer(torch.optim.AdamW(made.parameters(), lr=1e-3))
    tokens, labels = data(made.config.vocab_size)
    rows = len(tokens) // run.data_size
    mine = [t[run.data_rank * rows :][:rows] for t in (tokens, labels)]
    losses, before = [], None

    def step():
        losses.append(run.forward_backward([{"input_ids": mine[0], "labels": mine[1]}]).item())
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # FSDP sets itself up
        step()
    before, path = hooks(made), None
    if folder is None:
        for _ in range(3):
            step()
    else:
        with run.profile(folder, wait=0, warmup=1, active=1, ranks=ranks) as profile:
            for _ in range(3):
                step()
                profile.step()
        path = profile.path
    local = (p.to_local() if hasattr(p, "to_local") else p for p in made.parameters())
    parameters = [p.detach().clone() for p in local]
    return losses, parameters, before == hooks(made), path


def profiled(model, plan, overrides, folder, ranks="all"):
    """Whether numbers are those of a run without a profile, whether hooks are as they were, and the
    ranges of the step.
    """
    right = trained(model, plan, overrides, None, ranks)
    losses, parameters, same, path = trained(model, plan, overrides, folder, ranks)
    equal = losses == right[0] and all(map(torch.equal, parameters, right[1]))
    distributed.barrier()
    if path is None:
        return equal, same, None
    events = json.loads(Path(path).read_text())["traceEvents"]
    named = (e["name"] for e in events if e.get("cat") == "user_annotation")
    return equal, same, Counter(n for n in named if not n.startswith(("FSDP::", "ProfilerStep")))
