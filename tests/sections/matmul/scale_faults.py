"""Faults in the scales of fp8 matmuls."""

from torch import distributed
from torch.distributed.tensor import DTensor, Replicate


def wrong_amax(kind):
    """torchao's largest value, with a fault in the ranks that it is taken over."""
    from torchao.float8 import float8_utils

    right = float8_utils.tensor_to_amax

    def amax(x, *given, **options):
        if not isinstance(x, DTensor) or kind == "right":
            return right(x, *given, **options)
        own = right(x.to_local() if kind == "of a rank" else x, *given, **options)
        if own.ndim:  # of rows
            return right(x, *given, **options)
        if kind == "of data ranks too":
            own = own.full_tensor().clone()
            distributed.all_reduce(own, distributed.ReduceOp.MAX)
        where = [Replicate()] * x.device_mesh.ndim
        return DTensor.from_local(own, x.device_mesh, where, run_check=False)

    return amax
