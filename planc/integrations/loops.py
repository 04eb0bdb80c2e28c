"""The common parts of the loops of other libraries."""

import os
from typing import Any

from torch import distributed

from planc.ir.mesh_axes import LOADED
from planc.ops.lowered import Lowered
from planc.runtime.run import Run


def require_served(lowered: Lowered, loop: str) -> None:
    """Raises ValueError for a plan that a loop cannot run which calls the model with whole rows.

    Args:
        lowered: the plan.
        loop: the name of the loop, in the possessive form where it has one.
    """
    names = [axis.name for axis in lowered.axes if axis.size > 1]
    other = [name for name in names if name not in LOADED]
    if lowered.pipeline is not None or lowered.sequence_parts > 1 or other:
        raise ValueError(
            f"{loop} serves plans with the axes {', '.join(LOADED)}; this one has "
            f"{', '.join(names)}: use run.forward_backward, as docs/training.md shows"
        )


def ranks_of_data(run: Run) -> list[int]:
    """One rank of those that read the same rows, of each such set."""
    data_slice = tuple(slice(None) if a.name in run.lowered.data else 0 for a in run.lowered.axes)
    return sorted(run.mesh.mesh[data_slice].flatten().tolist())


def of_data_ranks(run: Run, gathered: Any) -> Any:
    """The rows of one rank of those that read the same ones, of what accelerate has gathered from
    all ranks, in nested tensors [rows of all ranks, ...].
    """
    from accelerate.utils import recursively_apply

    picked = ranks_of_data(run)
    world = distributed.get_world_size()
    return recursively_apply(
        lambda tensor: tensor.unflatten(0, (world, -1))[picked].flatten(0, 1), gathered
    )


def save_weights(run: Run, folder: str | os.PathLike[str]) -> None:
    """Writes what a loop keeps of a model: its adapters in peft's files where the plan has some,
    else all weights for `from_pretrained`.
    """
    if run.lowered.adapters:
        run.save_adapters(folder)
    else:
        run.export(folder, replace=True)


def load_weights(run: Run, folder: str | os.PathLike[str]) -> None:
    """Reads what `save_weights` wrote."""
    if run.lowered.adapters:
        run.load_adapters(folder)
    else:
        run.load(folder)
