"""The device mesh of a run, the meshes derived from it, and the process group below."""

from __future__ import annotations

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planc.lowering.ops import Lowered


def device_of(model: nn.Module, asked: str | None) -> str:
    """Where a model is to run: as asked, else where it is; from meta, CUDA where there is one."""
    if asked:
        return asked
    first = next(model.parameters(), None)
    kind = first.device.type if first is not None else "meta"
    if kind != "meta":
        return kind
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def start(device_type: str) -> None:
    """Starts the default process group where there is none: torchrun's, or one of one rank."""
    if distributed.is_initialized():
        return
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        distributed.init_process_group(backend)
    else:
        store = distributed.HashStore()
        distributed.init_process_group(backend, rank=0, world_size=1, store=store)


class Meshes:
    """The mesh of a lowered plan, and the parts of it that its operations work over."""

    def __init__(self, lowered: Lowered, device_type: str) -> None:
        names = tuple(a.name for a in lowered.axes)
        sizes = tuple(a.size for a in lowered.axes)
        self.root: DeviceMesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        self._parts: dict[tuple[tuple[str, ...], tuple[str, ...]], DeviceMesh] = {}
        self._flat: dict[tuple[str, ...], str] = {}

    def part(self, *axes: str) -> DeviceMesh:
        """One dimension: an axis, or several flattened to one, outermost first."""
        return self.root[self._one(axes)]

    def data(self, shard: tuple[str, ...], replicate: tuple[str, ...]) -> DeviceMesh:
        """What `fully_shard` takes: (shard), or (replicate, shard) for hybrid sharding."""
        key = (shard, replicate)
        if key not in self._parts:
            inner = self._one(shard)
            names = (self._one(replicate), inner) if replicate else (inner,)
            self._parts[key] = self.root[names] if len(names) > 1 else self.root[inner]
        return self._parts[key]

    def _one(self, axes: tuple[str, ...]) -> str:
        """The name of one mesh dimension that stands for these axes."""
        if len(axes) == 1:
            return axes[0]
        order = list(self.root.mesh_dim_names or ())
        axes = tuple(sorted(axes, key=order.index))
        if axes not in self._flat:
            name = "_".join(axes)
            self.root[axes]._flatten(name)
            self._flat[axes] = name
        return self._flat[axes]
