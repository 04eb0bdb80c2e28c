"""Two collectives of torch that it has renamed; the former names warn on every rank."""

from typing import Any

from torch import Tensor, distributed


def all_gather(every: Tensor, own: Tensor, group: Any, async_op: bool = False) -> Any:
    """Fills `every` with the tensors of all ranks, one after the other."""
    named = getattr(distributed, "all_gather_single", None)  # torch 2.13
    return (named or distributed.all_gather_into_tensor)(
        every, own, group=group, async_op=async_op
    )


def reduce_scatter(own: Tensor, every: Tensor, group: Any) -> None:
    """Fills `own` with this rank's part of the sum of `every` over the ranks."""
    named = getattr(distributed, "reduce_scatter_single", None)  # torch 2.13
    (named or distributed.reduce_scatter_tensor)(own, every, group=group)
