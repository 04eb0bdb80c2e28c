"""Makes torch's functions correct for models under a plan, or refuses them at the script's line.

torch has no hooks for these calls. Each function is replaced once for the process, where torch
itself looks it up, so that names which a script imported earlier are covered too.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@functools.cache
def replace_functions() -> None:
    """Replaces the functions of torch, once for the process."""
    DTensor.data = property(_get_data, _set_data)


# torch ignores `parameter.data = value` of a DTensor, whose local tensor is an attribute ----------


def _get_data(tensor: DTensor) -> Any:
    return Tensor.data.__get__(tensor)


def _set_data(tensor: DTensor, value: Tensor) -> None:
    """Gives a DTensor the local tensor of another one, as `Tensor.data` does for storages.

    Raises:
        ValueError: the shapes or meshes differ, or the value is not a DTensor.
    """
    meshes = [getattr(each, "device_mesh", None) for each in (tensor, value)]
    if meshes[0] != meshes[1] or tensor.shape != value.shape:
        raise ValueError(
            f"`data` of a DTensor {tuple(tensor.shape)} on {meshes[0]} was set to a tensor "
            f"{tuple(value.shape)} on {meshes[1]}; write the values with `copy_`"
        )
    with torch.no_grad():
        placed = value.detach().redistribute(placements=tensor.placements)
    tensor._local_tensor = placed._local_tensor
