"""Random number generators that are equal on the ranks of an axis.

Emitted scripts inline these definitions without their types.
"""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


def sync_rng_state(mesh: DeviceMesh, axis: str) -> None:
    """Copies the random state of an axis's first rank to all, for CPU and device.

    States stay equal while ranks draw equally many numbers, as for equal shards.
    """
    group = mesh[axis].get_group()
    first = distributed.get_global_rank(group, 0)

    def of_first(state: torch.Tensor) -> torch.Tensor:
        state = state.to(mesh.device_type)
        distributed.broadcast(state, src=first, group=group)
        return state.cpu()

    torch.set_rng_state(of_first(torch.get_rng_state()))
    if mesh.device_type == "cuda":
        torch.cuda.set_rng_state(of_first(torch.cuda.get_rng_state()))
