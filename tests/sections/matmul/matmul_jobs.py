"""What test_matmul_numerics.py runs on every rank of the pool."""

import contextlib
from unittest import mock

import torch
from numerics import build, data
from saving_jobs import batch
from scale_faults import wrong_amax
from torch import nn

import planc
from planc.runtime.executor import apply_for_reference
from planc.runtime.standalone.shards import rank_orders, whole_of
from planc.simulate.numerics import for_trial, parameters_by_name
from planc.simulate.trial_part import trial_part


def train(model, plan, overrides, fault=""):
    """The largest errors of a gradient in three steps, in the 2-norm, beside one process with the
    same fp8 matmuls, whose passes have the rows of a data rank each.

    `fault` is where the largest value of a tensor is taken, or `not scaled`.
    """
    world = torch.distributed.get_world_size()
    single, made = build(model), build(model)
    lowered = planc.lower(single, plan, world_size=world, overrides=overrides)
    single, made = for_trial(single, lowered), for_trial(made, lowered)
    single = apply_for_reference(single, trial_part(lowered, section="matmul"))
    with _broken(fault):
        run = planc.apply(made, plan, overrides=overrides, device_type="cpu", require="nothing")
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (made, single))
    ours, found = run.optimizer(ours), []
    for seed in range(3):
        tokens, labels = data(single.config.vocab_size, seed)
        parts = (t.chunk(run.data_size) for t in (tokens, labels))
        for rows, wanted in zip(*parts, strict=True):
            loss = single(input_ids=rows, labels=wanted, use_cache=False).loss
            (loss / run.data_size).backward()
        rows, wanted = batch(run, seed)
        with _broken(fault):
            run.forward_backward([{"input_ids": rows, "labels": wanted}])
        found.append(_error(made, single))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return found


def _error(made: nn.Module, single: nn.Module) -> float:
    orders, right = rank_orders(made), dict(single.named_parameters())
    found = []
    for name, parameter in parameters_by_name(made):
        if parameter.grad is not None:
            mine, wanted = whole_of(parameter.grad, orders.get(name)), right[name].grad
            found.append(((mine - wanted).norm() / wanted.norm()).item())
    return max(found)


@contextlib.contextmanager
def _broken(fault):
    """A fault on the ranks alone."""
    name = "torchao.float8.float8_utils.tensor_to_amax"
    if fault == "not scaled":
        name = "torch.nn.Module.register_forward_pre_hook"
        right = nn.Module.register_forward_pre_hook

        def broken(module, hook, **options):
            scale = getattr(hook, "__qualname__", "").startswith("scale_before_forward")
            return None if scale else right(module, hook, **options)
    else:
        broken = wrong_amax(fault or "right")
    with mock.patch(name, broken):
        yield
