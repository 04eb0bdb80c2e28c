"""Mistakes in products of numbers in 8 bits: contexts as those of `silent_faults`, on ranks alone.

They need torchao, which the modules that are imported with this one do not.
"""

from unittest import mock

import torch
from scale_faults import wrong_amax
from silent_axis_faults import on_a_rank


def largest_value_of_a_shard():
    return mock.patch("torchao.float8.float8_utils.tensor_to_amax", wrong_amax("of a rank"))


def largest_value_of_other_rows():
    return mock.patch("torchao.float8.float8_utils.tensor_to_amax", wrong_amax("of data ranks too"))


def gradients_with_two_bits():
    """Gradients in e5m2, which has two bits of a fraction and not three."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm

    real = mx_mm.backward

    def backward(ctx, gradient):
        if on_a_rank():
            ctx.grad_elem_dtype = torch.float8_e5m2
        return real(ctx, gradient)

    return mock.patch.object(mx_mm, "backward", staticmethod(backward))
