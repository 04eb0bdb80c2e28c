"""Mistakes in what steps parameters: contexts as those of `silent_faults`. Gradients are right in
all of them. The ranks alone are wrong; the single process computes as it should.
"""

import math
from functools import partial
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from planc.runtime.standalone import kept_states, optimizer
from planc.runtime.standalone.optimizer import Bucket, PlannedOptimizer, orthogonal
from planc.runtime.standalone.shards import part_of


def on_ranks(where, name, wrong):
    """`wrong(real)` in place of a function, where its first argument is of several ranks."""
    real = getattr(where, name)
    broken = wrong(real)

    def called(*args, **keywords):
        first = args[0]
        several = hasattr(first, "placements") or getattr(first, "group", None) is not None
        return (broken if several else real)(*args, **keywords)

    return mock.patch.object(where, name, called)


def each_rank_orthogonalizes_its_shard():
    def own(_bucket, updates, group, dtype):
        return [orthogonal(u[None].to(dtype), group["ns_steps"])[0] for u in updates]

    return on_ranks(Bucket, "orthogonalize", lambda _: own)


def scaled_by_local_rows():
    def turn(_bucket, matrices, group, dtype):
        for matrix in matrices:
            turned = orthogonal(matrix[None].to(dtype), group["ns_steps"])[0]
            rows, columns = matrix.shape
            matrix.copy_(turned * math.sqrt(max(1.0, rows / 2 / columns)))

    return on_ranks(Bucket, "turn", lambda _: turn)


def fused_weight_as_one_matrix():
    return on_ranks(optimizer, "units_of", lambda real: lambda p, o, _, **k: real(p, o, (), **k))


def parts_in_stored_order():
    return on_ranks(optimizer, "units_of", lambda real: lambda p, _, c, **k: real(p, None, c, **k))


def no_rows_to_pick():
    """Each rank picks the largest rows of its shard before they are exchanged."""

    def picked(real):
        def orthogonalized(bucket, updates, *given):
            for update in updates:
                torch.topk(update.norm(dim=-1), 1, dim=-1)
            return real(bucket, updates, *given)

        return orthogonalized

    return on_ranks(Bucket, "orthogonalize", picked)


def last_stage_orthogonalizes_the_head():
    """A stage without the first block does not know the tied weight for an embedding."""

    def terms_of(real):
        def terms(model, name):
            others = [n for n, _ in model.named_parameters() if n != name]
            if "embed_tokens" not in name or any("layers.0." in n for n in others):
                return real(model, name)
            return next(t for t in map(partial(real, model), others) if t["algorithm"] == "muon")

        return terms

    return mock.patch.object(optimizer, "terms_of", terms_of(optimizer.terms_of))


def factors_of_groups_lost():
    def init(real):
        def made(planned, groups, *given):
            real(planned, [{**g, "lr": groups[0]["lr"]} for g in groups], *given)

        return made

    return sharded_groups("__init__", init)


def one_group_keeps_its_gradients():
    """Only the groups of Muon are known to the optimizer that zeroes gradients."""

    def zero_grad(_):
        def zeroed(planned, set_to_none=True):
            for group in planned.param_groups:
                for p in group["params"] if group["algorithm"] == "muon" else ():
                    p.grad = None

        return zeroed

    return sharded_groups("zero_grad", zero_grad)


def sharded_groups(name, wrong):
    """`wrong(real)` in place of a method of the plan's optimizer where parameters are shards."""
    real = getattr(PlannedOptimizer, name)
    broken = wrong(real)

    def called(planned, *given, **options):
        groups = given[0] if name == "__init__" else planned.param_groups
        parts = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        return (broken if parts else real)(planned, *given, **options)

    return mock.patch.object(PlannedOptimizer, name, called)


def small_shards_keep_wide_states():
    """A state is in 8 bits if the rank's part of the parameter has so many elements."""
    real = kept_states.create_state

    def kept(values, parameter, name, group):
        few = isinstance(parameter, DTensor) and part_of(parameter).numel() < LEAST
        return real(values, parameter, name, {**group, "block": 0} if few else group)

    return mock.patch.object(kept_states, "create_state", kept)


LEAST = 4096
"""The least elements of a state in 8 bits. Source: torchao, bitsandbytes."""
