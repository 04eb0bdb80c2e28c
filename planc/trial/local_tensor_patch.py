"""Patches `torch.tensor` for numbers that are simulated tensors of all ranks.

LocalTensorMode cannot convert such a tensor to a number for `torch.tensor` and recurses without
end. Models that compute positions from image grids do that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Literals(TorchFunctionMode):  # type: ignore[misc]
    """While active, `torch.tensor` makes each rank's tensor from that rank's numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.tensor or not args or isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        ranks = next((t._local_tensors for t in _tensors(args[0])), None)
        if ranks is None:
            return func(*args, **kwargs)
        from torch.distributed._local_tensor import LocalTensor

        made = {r: func(_of_rank(args[0], r), *args[1:], **kwargs) for r in ranks}
        parts = {r: getattr(t, "_local_tensors", {r: t})[r] for r, t in made.items()}
        return LocalTensor(parts)


def _tensors(data: Any) -> Any:
    """Yields the simulated tensors in nested lists."""
    if isinstance(data, list | tuple):
        for one in data:
            yield from _tensors(one)
    elif getattr(data, "_local_tensors", None) is not None:
        yield data


def _of_rank(data: Any, rank: int) -> Any:
    """The data of one rank, with its tensors replaced by numbers."""
    if isinstance(data, list | tuple):
        return [_of_rank(one, rank) for one in data]
    if (parts := getattr(data, "_local_tensors", None)) is not None:
        return parts[rank].tolist()
    return data
