"""The weights that ranks have, compared before the plan distributes them and before training.

Each rank keeps its part of what it has built itself. Where the ranks have built different weights,
from another seed, the parts are of different models: copies are never equal again, and shards do
not belong together. What a script changes afterwards is compared in the first training pass.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planc.diagnostics.diagnostic import PlanError
from planc.ops.lowered import Lowered
from planc.runtime.meshes import rows_of
from planc.runtime.preconditions import of_all_ranks, stop
from planc.runtime.safeguards.checksums import difference, model_sums, plain, text_sum
from planc.runtime.script_line import script_line
from planc.runtime.standalone.shards import plain_name, splits

T = TypeVar("T")
_log = logging.getLogger("planc")
_HELP = (
    "call `run.load(folder)`, or `torch.manual_seed` with the same seed on every rank before the "
    "model is built, or say `load { weights = rank0 }` in the plan"
)


@dataclass(frozen=True, slots=True)
class WeightSums:
    """Checksums of what a rank has built, by name and in total; whether some of it is on meta."""

    by_name: dict[str, int]
    total: str
    meta: bool


def weight_sums(model: nn.Module) -> WeightSums:
    """The checksums of a model that is not parallel yet."""
    found = model_sums(model)
    meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return WeightSums(found, str(text_sum(repr(sorted(found.items())))), meta)


def unequal(
    model: nn.Module, lowered: Lowered, own: WeightSums, totals: Sequence[str], device: str
) -> PlanError | None:
    """PL484 if the ranks (`totals`) have different weights, to be raised unless weights are loaded;
    a collective then, and a warning on rank 0. Under `load { weights = rank0 }` rank 0 gives all
    its own, and they are equal.
    """
    if len(set(totals)) == 1:
        return None
    built = of_all_ranks(own)
    if lowered.load.weights == "rank0" and not any(sums.meta for sums in built):
        _send(model, device)
        return None
    found = difference([sums.by_name for sums in built], range(len(built)))
    assert found is not None  # the totals differ
    error = stop(
        "PL484",
        f"the ranks {found.ranks} have built different weights: {found.names[0]} is the first of "
        f"{len(found.names):,} that differ, and nothing has loaded others",
        *script_line("the model is different before this line"),
        help=_HELP,
    )
    if distributed.get_rank() == 0:
        told = error.diagnostics[0].message
        _log.warning("%s; `run.load` is to replace them before the first pass", told)
    return error


@torch.no_grad()  # type: ignore[untyped-decorator]
def _send(model: nn.Module, device: str) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        if plain(tensor):
            sent = tensor.detach().to(device).contiguous()
            distributed.broadcast(sent, 0)
            tensor.copy_(sent)


@dataclass(slots=True)
class SameWeights:
    """Compares weights that a script may change between `apply` or `run.load` and the first
    training pass: the ranks must change the same tensors, and those that hold the same shard must
    have equal values.

    Args:
        meshes: the axes whose ranks have the same modules, one dimension each.
        built: PL484, to be raised unless all weights are loaded.
    """

    meshes: tuple[DeviceMesh, ...] = ()
    built: PlanError | None = None
    noted: dict[str, int] | None = field(default=None, init=False)
    """The checksums when the ranks last had the same weights."""

    @property
    def done(self) -> bool:
        return self.built is None and self.noted is None

    def note(self, model: nn.Module) -> None:
        """All ranks have the same weights now."""
        self.built, self.noted = None, model_sums(model) if self.meshes else None

    def require(self, model: nn.Module) -> None:
        """Compares the weights before the first training pass.

        Raises:
            PlanError: PL484, on all ranks that have the same modules.
        """
        if self.built is not None:
            raise self.built
        if (noted := self.noted) is None:
            return
        self.noted, now = None, model_sums(model)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        told = ""
        for mesh in self.meshes:
            ranks = distributed.get_process_group_ranks(mesh.get_group())
            # what has not changed is alike, also compressed weights, whose parts are plain tensors
            changed = {n: value for n, value in now.items() if noted.get(n) != value}
            own = dict.fromkeys(now, (False, 0)) | {
                name: (True, 0 if _split(tensors[name], ranks) else value)
                for name, value in changed.items()
            }
            total = torch.tensor([text_sum(repr(sorted(own.items())))], device=mesh.device_type)
            if len({row[0] for row in rows_of(total, mesh)}) > 1:
                every, axis = _all_gather_objects(mesh, own), "_".join(mesh.mesh_dim_names or ())
                told = told or _describe_change(every, ranks, axis)
        for mesh in self.meshes:  # so that all ranks of all axes raise
            told = next(filter(None, _all_gather_objects(mesh, told)), "")
        if told:
            help = (
                "change weights on all ranks alike, from one seed or from equal files; `run.load` "
                "and `run.load_adapters` compare the files that the ranks read"
            )
            line = script_line("the first training pass is here")
            self.built = stop("PL484", told, *line, help=help)
            raise self.built


def _all_gather_objects(mesh: DeviceMesh, own: T) -> list[T]:
    """All-gathers an object of each rank of a mesh, by rank."""
    every = [own] * mesh.size()
    distributed.all_gather_object(every, own, group=mesh.get_group())
    return every


def _split(tensor: Tensor, ranks: Sequence[int]) -> bool:
    """Whether these ranks, of which this is one, hold different shards of a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    groups = (
        distributed.get_process_group_ranks(tensor.device_mesh.get_group(dim))
        for dim, placement in enumerate(tensor.placements)
        if splits(placement)
    )
    return any(len({*group} & {*ranks}) > 1 for group in groups)


def _describe_change(
    every: Sequence[dict[str, tuple[bool, int]]], ranks: Sequence[int], axis: str
) -> str:
    found = difference(every, ranks)
    assert found is not None  # the totals differ
    name, count = found.names[0], len(found.names)
    shown = plain_name(name)
    some = len({own[name][0] for own in every if name in own}) > 1
    how = "on some of them alone" if some else "to different values"
    return (
        f"the ranks {found.ranks} of {axis} have different weights: {shown}, the first of {count:,}"
        f", was changed {how} after `planc.apply`"
    )
