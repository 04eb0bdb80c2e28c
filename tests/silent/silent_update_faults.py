"""Mistakes in what steps parameters: contexts as those of `silent_faults`. Gradients are right in
all of them. The ranks alone are wrong; the single process computes as it should.
"""

import math
from unittest import mock

from planc.runtime.standalone import optimizer
from planc.runtime.standalone.optimizer import Bucket, orthogonal


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

    return on_ranks(Bucket, "orthogonalized", lambda _: own)


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
